/* The most that a wire and these cores carry for an all-reduce, without the all-reduce.
 *
 *     cc -O2 -o wire_ceiling wire_ceiling.c && ./wire_ceiling RANK WORLD BYTES,BYTES... ring|mesh PORT ADDRESS_OF_0 ADDRESS_OF_1 ...
 *
 * Every process sends 2(WORLD - 1)/WORLD * BYTES to its successor and receives as many from its predecessor at the same time
 * (ring), or the same bytes in equal parts to and from everybody (mesh), over one TCP connection each way, in pieces of 1 MiB
 * from and to the same two buffers: nothing is framed, folded or waited for but bytes. Prints one JSON line a size, the median of the times of the rounds after the first. Gives up after 60 s without a byte. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <signal.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PIECE = 1 << 20, ROUNDS = 31, PATIENCE_MS = 60000, MOST = 64 };

static char outgoing[PIECE], incoming[PIECE];

static void fail(const char *what) { perror(what); exit(1); }

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static struct sockaddr_in address(const char *text, int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
    if (inet_pton(AF_INET, text, &a.sin_addr) != 1) { fprintf(stderr, "no address: %s\n", text); exit(2); }
    return a;
}

static int connect_to(const char *text, int port) {
    struct sockaddr_in a = address(text, port);
    for (double until = now_us() + PATIENCE_MS * 1e3;;) {
        int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
        if (s < 0) fail("socket");
        if (!connect(s, (struct sockaddr *)&a, sizeof a)) {
            setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
            return s;
        }
        close(s);
        if (now_us() > until) fail("connect");
        usleep(5000);
    }
}

struct peer { int to, from; size_t bytes, sent, received; };

/* With all peers, both directions, until each has moved its bytes. */
static void exchange(struct peer *peer, int peers) {
    for (int i = 0; i < peers; i++) peer[i].sent = peer[i].received = 0;
    for (;;) {
        int moved = 0, wanted = 0;
        struct pollfd p[2 * MOST];
        for (int i = 0; i < peers; i++) {
            struct peer *q = &peer[i];
            size_t left = q->bytes - q->received;
            if (left) {
                ssize_t n = recv(q->from, incoming, left < PIECE ? left : PIECE, MSG_DONTWAIT);
                if (n == 0) { fprintf(stderr, "a peer is gone\n"); exit(1); }
                if (n < 0 && errno != EAGAIN && errno != EINTR) fail("recv");
                if (n > 0) q->received += n, moved = 1;
            }
            left = q->bytes - q->sent;
            if (left) {
                ssize_t n = send(q->to, outgoing, left < PIECE ? left : PIECE, MSG_DONTWAIT | MSG_NOSIGNAL);
                if (n < 0 && errno != EAGAIN && errno != EINTR) fail("send");
                if (n > 0) q->sent += n, moved = 1;
            }
            if (q->received < q->bytes) p[wanted++] = (struct pollfd){q->from, POLLIN, 0};
            if (q->sent < q->bytes) p[wanted++] = (struct pollfd){q->to, POLLOUT, 0};
        }
        if (!wanted) return;
        if (!moved && poll(p, wanted, PATIENCE_MS) == 0) { fprintf(stderr, "nothing moves\n"); exit(1); }
    }
}

static int ascending(const void *a, const void *b) {
    double d = *(const double *)a - *(const double *)b;
    return (d > 0) - (d < 0);
}

int main(int argc, char **argv) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int world = argc > 2 ? atoi(argv[2]) : 0, rank = argc > 2 ? atoi(argv[1]) : 0, on = 1;
    if (world < 2 || world > MOST || rank < 0 || rank >= world || argc != 6 + world) {
        fprintf(stderr, "usage: %s RANK WORLD BYTES,BYTES... ring|mesh PORT ADDRESS...\n", argv[0]);
        return 2;
    }
    int ring = !strcmp(argv[4], "ring"), port = atoi(argv[5]);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in mine = address(argv[6 + rank], port);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (listener < 0 || bind(listener, (struct sockaddr *)&mine, sizeof mine) || listen(listener, MOST)) fail("listen");
    struct peer peer[MOST];
    /* To the successor and from the predecessor, or with everybody, who is told apart by the first byte. */
    int peers = ring ? 1 : world - 1;
    for (int k = 0; k < peers; k++) {
        char me = rank;
        peer[k].to = connect_to(argv[6 + (rank + 1 + k) % world], port);
        if (send(peer[k].to, &me, 1, MSG_NOSIGNAL) != 1) fail("send");
    }
    for (int k = 0; k < peers; k++) {
        int from = accept(listener, NULL, NULL);
        char who = 0;
        if (from < 0 || recv(from, &who, 1, MSG_WAITALL) != 1) fail("accept");
        peer[ring ? 0 : (who - rank - 1 + world) % world].from = from;
    }
    memset(outgoing, 1, sizeof outgoing);
    memset(incoming, 1, sizeof incoming);
    for (char *size = strtok(argv[3], ","); size; size = strtok(NULL, ",")) {
        size_t n = strtoull(size, NULL, 10);
        double us[ROUNDS];
        for (int i = 0; i < peers; i++) peer[i].bytes = 2 * (world - 1) * n / world / peers;
        exchange(peer, peers);
        for (int k = 0; k < ROUNDS; k++) {
            double began = now_us();
            exchange(peer, peers);
            us[k] = now_us() - began;
        }
        qsort(us, ROUNDS, sizeof *us, ascending);
        if (rank == 0) printf("{\"op\": \"%s-ceiling\", \"bytes\": %zu, \"median_us\": %.3f}\n", ring ? "ring" : "mesh", n, us[ROUNDS / 2]);
    }
    return 0;
}
