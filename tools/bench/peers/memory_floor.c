/* The least any all-reduce of two ranks of one host can do, for `versus.py collectives`.
 *
 *   cc -O3 -march=native memory_floor.c -o memory_floor && ./memory_floor 1048576,26214400
 *
 * Two processes, vectors in shared memory, two passes: wait for the other, sum
 * one's own half and store the sum to both vectors, wait again. No descriptor is
 * checked, no deadline kept, nobody is watched. Same protocol and same JSON keys
 * as `phalanx bench all-reduce --json`.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_ITERS = 2000, MIN_ITERS = 5 };
static struct shared {
    _Atomic unsigned arrived;
    int iters;
    double took[2][MAX_ITERS];
} *sh;
static unsigned phase;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void barrier(void) {
    phase += 2;
    atomic_fetch_add(&sh->arrived, 1);
    for (unsigned spins = 0; (int)(atomic_load(&sh->arrived) - phase) < 0;)
        if (++spins > 10000) sched_yield();
}

static void *map(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_ANONYMOUS | MAP_SHARED, -1, 0);
    if (p == MAP_FAILED) exit(1);
    memset(p, 0, bytes);
    return p;
}

static void all_reduce(float *restrict a, float *restrict b, size_t n) {
    barrier();
    for (size_t i = 0; i < n; i++) a[i] = b[i] = a[i] + b[i];
    barrier();
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    if (argc < 2) return fprintf(stderr, "usage: memory_floor BYTES,...\n"), 2;
    sh = map(sizeof *sh);
    for (char *next = argv[1]; next; next = strchr(next, ',') ? strchr(next, ',') + 1 : NULL) {
        size_t bytes = strtoull(next, NULL, 10), n = bytes / 4, half = n / 2;
        float *a = map(bytes + 4), *b = map(bytes + 4);
        pid_t child = fork();
        int rank = child == 0;
        size_t start = rank ? half : 0, len = rank ? n - half : half;
        for (int i = 0; i < 3; i++) all_reduce(a + start, b + start, len);
        double t = now();
        for (int i = 0; i < 3; i++) all_reduce(a + start, b + start, len);
        double want = 3.0 / (now() - t);
        if (!rank) sh->iters = want > MAX_ITERS ? MAX_ITERS : want < MIN_ITERS ? MIN_ITERS : (int)want;
        barrier();
        for (int i = 0; i < sh->iters; i++) {
            barrier();
            t = now();
            all_reduce(a + start, b + start, len);
            sh->took[rank][i] = now() - t;
        }
        if (rank) _exit(0);
        waitpid(child, NULL, 0);
        for (int i = 0; i < sh->iters; i++)
            if (sh->took[1][i] > sh->took[0][i]) sh->took[0][i] = sh->took[1][i];
        qsort(sh->took[0], sh->iters, sizeof(double), ascending);
        printf("{\"op\": \"all-reduce\", \"transport\": \"memory\", \"world\": 2, \"bytes\": %zu, \"iters\": %d, "
               "\"median_us\": %.3f, \"p10_us\": %.3f, \"p90_us\": %.3f}\n", bytes, sh->iters,
               sh->took[0][sh->iters / 2] * 1e6, sh->took[0][sh->iters / 10] * 1e6, sh->took[0][sh->iters * 9 / 10] * 1e6);
        fflush(stdout);
        munmap(a, bytes + 4);
        munmap(b, bytes + 4);
        phase = 0;
        atomic_store(&sh->arrived, 0);
    }
    return 0;
}
