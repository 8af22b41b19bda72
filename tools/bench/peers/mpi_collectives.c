/* Open MPI's side of `versus.py collectives`: f32 over shared memory.
 *
 *   mpicc -O3 -march=native mpi_collectives.c -o mpi_collectives
 *   mpirun --allow-run-as-root --oversubscribe -np 2 ./mpi_collectives all-reduce 4,1024,1048576
 *
 * Prints one JSON line a size with the keys of `phalanx bench OP --json`;
 * every iteration begins with a barrier and counts with the time of its
 * slowest rank, as ours does. Bytes are those of the whole result
 * (all-gather) or the whole input (reduce-scatter, all-to-all).
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ITERS = 2000, MIN_ITERS = 5 };
static const char *op;
static int rank, world;
static float *in, *out;

static void call(size_t count) {
    int part = (int)(count / world) > 0 ? (int)(count / world) : 1;
    if (!strcmp(op, "all-reduce")) MPI_Allreduce(MPI_IN_PLACE, out, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    else if (!strcmp(op, "broadcast")) MPI_Bcast(out, (int)count, MPI_FLOAT, 0, MPI_COMM_WORLD);
    else if (!strcmp(op, "all-gather")) MPI_Allgather(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD);
    else if (!strcmp(op, "reduce-scatter"))
        MPI_Reduce_scatter_block(in, out, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    else if (!strcmp(op, "all-to-all")) MPI_Alltoall(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD);
    else MPI_Barrier(MPI_COMM_WORLD);
}

static double timed(size_t count) {
    MPI_Barrier(MPI_COMM_WORLD);
    double t = MPI_Wtime();
    call(count);
    return MPI_Wtime() - t;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    if (argc < 3) {
        if (rank == 0) fprintf(stderr, "usage: mpi_collectives OP BYTES,...\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    op = argv[1];
    double target = argc > 3 ? atof(argv[3]) : 1.0; /* seconds a size */
    static double t[MAX_ITERS];
    char *sizes = strcmp(op, "barrier") ? argv[2] : "0";
    for (char *next = sizes; next; next = strchr(next, ',') ? strchr(next, ',') + 1 : NULL) {
        size_t bytes = strtoull(next, NULL, 10), count = bytes / 4 ? bytes / 4 : 1;
        size_t room = (count + world) * sizeof(float);
        in = malloc(room);
        out = malloc(room);
        /* Not zeros: malloc and memset(0) become calloc, whose pages are all the one page of zeros until
         * they are written, so that an input would be read from the first-level cache. */
        for (size_t i = 0; i < room / sizeof(float); i++) in[i] = out[i] = 1;
        double each = 0, worst;
        for (int i = 0; i < 3; i++) call(count);
        /* A tenth of a second to settle on the cores, as ours. */
        for (int i = 0; i < 3; i++) each += timed(count) / 3;
        MPI_Allreduce(&each, &worst, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        for (int i = 0, n = (int)(0.1 / worst); i < n; i++) call(count);
        each = 0;
        for (int i = 0; i < 3; i++) each += timed(count) / 3;
        MPI_Allreduce(&each, &worst, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        double want = target / worst;
        int iters = want > MAX_ITERS ? MAX_ITERS : want < MIN_ITERS ? MIN_ITERS : (int)want;
        for (int i = 0; i < iters; i++) t[i] = timed(count);
        MPI_Allreduce(MPI_IN_PLACE, t, iters, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        if (rank == 0) {
            qsort(t, iters, sizeof *t, ascending);
            printf("{\"op\": \"%s\", \"transport\": \"openmpi\", \"world\": %d, \"bytes\": %zu, \"iters\": %d, "
                   "\"median_us\": %.3f, \"p10_us\": %.3f, \"p90_us\": %.3f}\n", op, world, bytes, iters,
                   t[iters / 2] * 1e6, t[iters / 10] * 1e6, t[iters * 9 / 10] * 1e6);
            fflush(stdout);
        }
        free(in);
        free(out);
    }
    MPI_Finalize();
    return 0;
}
