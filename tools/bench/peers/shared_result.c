/* What a shared result would save: P ranks of one host, vectors in shared memory; each folds its own part from all vectors and
 * stores it either to all of them (in place, as phalanx does) or once to a common vector (shared). Then every rank reads the whole
 * result once, as an optimizer does.
 *
 *   cc -O3 -march=native shared_result.c -o shared_result && ./shared_result 26214400
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
enum { ROUNDS = 60, MOST = 8, BLOCK = 1024 };
static struct shared { _Atomic unsigned arrived; double reduce[MOST][ROUNDS], read[MOST][ROUNDS]; } *sh;
static unsigned phase, world;
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
static void barrier(void) {
    phase += world;
    atomic_fetch_add(&sh->arrived, 1);
    for (unsigned spins = 0; (int)(atomic_load(&sh->arrived) - phase) < 0;)
        if (world > 2 || ++spins > 10000) sched_yield();
}
static void *map(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_ANONYMOUS | MAP_SHARED, -1, 0);
    if (p == MAP_FAILED) exit(1);
    madvise(p, bytes, MADV_HUGEPAGE);
    memset(p, 0, bytes);
    return p;
}
static int up(const void *a, const void *b) { double x = *(const double *)a, y = *(const double *)b; return (x > y) - (x < y); }
int main(int argc, char **argv) {
    size_t bytes = argc > 1 ? strtoull(argv[1], NULL, 10) : 26214400, n = bytes / 4;
    for (int mode = 0; mode < 4; mode++) for (world = 2; world <= MOST; world *= 2) {
        int shared = mode % 2;
        sh = map(sizeof *sh); phase = 0;
        float *v[MOST], *common = map(bytes), *intos[MOST];
        for (unsigned r = 0; r < world; r++) v[r] = map(bytes);
        unsigned me = 0;
        for (unsigned r = 1; r < world && !me; r++) if (!fork()) me = r;
        size_t from = n / world * me, to = me + 1 == world ? n : n / world * (me + 1);
        int dests = shared ? 1 : (int)world;
        for (int d = 0; d < dests; d++) intos[d] = shared ? common : v[d];
        volatile float sink = 0;
        for (int i = 0; i < ROUNDS; i++) {
            barrier();
            double t = now();
            barrier();
            float block[BLOCK];
            for (size_t at = from; at < to; at += BLOCK) {
                size_t len = to - at < BLOCK ? to - at : BLOCK;
                memcpy(block, v[0] + at, len * 4);
                for (unsigned r = 1; r < world; r++) { const float *x = v[r] + at; for (size_t k = 0; k < len; k++) block[k] += x[k]; }
                for (int d = 0; d < dests; d++) memcpy(intos[d] + at, block, len * 4);
            }
            barrier();
            sh->reduce[me][i] = now() - t;
            t = now();
            float sum[16] = {0};
            const float *result = shared ? common : v[me];
            for (size_t k = 0; k + 16 <= n; k += 16) for (int j = 0; j < 16; j++) sum[j] += result[k + j];
            sink += sum[3];
            barrier();
            sh->read[me][i] = now() - t;
        }
        if (me) _exit(0);
        while (wait(NULL) > 0) {}
        qsort(sh->reduce[0], ROUNDS, sizeof(double), up); qsort(sh->read[0], ROUNDS, sizeof(double), up);
        printf("%u ranks, %-8s: reduce %.0f us, read %.0f us\n", world, shared ? "shared" : "in place", sh->reduce[0][ROUNDS / 2] * 1e6, sh->read[0][ROUNDS / 2] * 1e6);
        fflush(stdout);
        for (unsigned r = 0; r < world; r++) munmap(v[r], bytes);
        munmap(common, bytes); munmap(sh, sizeof *sh);
    }
}
