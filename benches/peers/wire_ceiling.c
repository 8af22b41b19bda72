/* The most that a wire and these cores carry for an all-reduce, without the all-reduce.
 *
 *     cc -O2 -o wire_ceiling wire_ceiling.c && ./wire_ceiling RANK WORLD BYTES,BYTES... PATTERN PORT ADDRESS_OF_0 ADDRESS_OF_1 ...
 *
 * Every process sends 2(WORLD - 1)/WORLD * BYTES to its successor and receives as many from its predecessor at the same time
 * (PATTERN ring), or the same bytes in equal parts to and from everybody (mesh, one TCP connection a pair), in pieces of at most 1 MiB,
 * from and to memory of BYTES each, as an all-reduce must: nothing is framed, folded or waited for but bytes.
 * PATTERN rotation-PIECE-STRICT-UNACKED is the mesh's traffic to one peer at a time, see rotate. Prints one JSON line
 * a size, the median of the times of the rounds after the first. Gives up after 60 s without a byte. */
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
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <signal.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PIECE = 1 << 20, ROUNDS = 31, PATIENCE_MS = 60000, MOST = 64 };

static char *outgoing, *incoming; /* as long as the data */

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

struct peer { int to, from; size_t bytes, first, sent, received; };

/* With all peers, both directions, until each has moved its bytes. */
static void exchange(struct peer *peer, int peers, size_t n) {
    for (int i = 0; i < peers; i++) peer[i].sent = peer[i].received = 0;
    for (;;) {
        int moved = 0, wanted = 0;
        struct pollfd p[2 * MOST];
        for (int i = 0; i < peers; i++) {
            struct peer *q = &peer[i];
            size_t left = q->bytes - q->received;
            if (left) {
                size_t at = (q->first + q->received) % n, room = n - at < PIECE ? n - at : PIECE;
                ssize_t got = recv(q->from, incoming + at, left < room ? left : room, MSG_DONTWAIT);
                if (got == 0) { fprintf(stderr, "a peer is gone\n"); exit(1); }
                if (got < 0 && errno != EAGAIN && errno != EINTR) fail("recv");
                if (got > 0) q->received += got, moved = 1;
            }
            left = q->bytes - q->sent;
            if (left) {
                size_t at = (q->first + q->sent) % n, room = n - at < PIECE ? n - at : PIECE;
                ssize_t put = send(q->to, outgoing + at, left < room ? left : room, MSG_DONTWAIT | MSG_NOSIGNAL);
                if (put < 0 && errno != EAGAIN && errno != EINTR) fail("send");
                if (put > 0) q->sent += put, moved = 1;
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

/* One peer at a time: `piece` bytes of the part to rank + 1, then to rank + 2, ..., round and round until all has left; and the
 * same again for the second half, as chunk owners scatter and gather. Strict: what comes from the peers on the other side is waited for
 * before the next piece; otherwise the next one begins when at most `unacked` bytes of the one before are under way. */
static void rotate(struct peer *peer, int peers, size_t n, size_t piece, int strict, int unacked) {
    size_t part = peer[0].bytes / 2;
    for (int i = 0; i < peers; i++) peer[i].sent = peer[i].received = 0;
    for (int half = 0; half < 2; half++) {
        for (size_t at = 0; at < part; at += piece) {
            size_t end = half * part + (at + piece < part ? at + piece : part);
            for (int k = 0; k < peers; k++) {
                struct peer *out = &peer[k], *in = &peer[peers - 1 - k];
                for (;;) {
                    int moved = 0, wanted = 0, queued = 0;
                    struct pollfd p[2 * MOST];
                    if (out->sent < end) {
                        size_t from = (out->first + out->sent) % n, room = n - from < PIECE ? n - from : PIECE, left = end - out->sent;
                        ssize_t put = send(out->to, outgoing + from, left < room ? left : room, MSG_DONTWAIT | MSG_NOSIGNAL);
                        if (put < 0 && errno != EAGAIN && errno != EINTR) fail("send");
                        if (put > 0) out->sent += put, moved = 1;
                        if (out->sent < end) p[wanted++] = (struct pollfd){out->to, POLLOUT, 0};
                    }
                    int mine = wanted;
                    for (int i = 0; i < peers; i++) {
                        struct peer *q = &peer[i];
                        size_t left = q->bytes - q->received;
                        if (!left || (strict && q != in)) continue;
                        if (strict && q->received >= end) continue;
                        size_t into = (q->first + q->received) % n, room = n - into < PIECE ? n - into : PIECE;
                        ssize_t got = recv(q->from, incoming + into, left < room ? left : room, MSG_DONTWAIT);
                        if (got == 0) { fprintf(stderr, "a peer is gone\n"); exit(1); }
                        if (got < 0 && errno != EAGAIN && errno != EINTR) fail("recv");
                        if (got > 0) q->received += got, moved = 1;
                        p[wanted++] = (struct pollfd){q->from, POLLIN, 0};
                    }
                    if (!mine && unacked >= 0 && (ioctl(out->to, SIOCOUTQ, &queued) || queued > unacked)) {
                        /* No event tells of it. */
                        if (!moved) { struct timespec turn = {0, 100000}; ppoll(p, wanted, &turn, NULL); }
                        continue;
                    }
                    if (out->sent >= end && (!strict || in->received >= end)) break;
                    if (!moved && poll(p, wanted, PATIENCE_MS) == 0) { fprintf(stderr, "nothing moves\n"); exit(1); }
                }
            }
        }
        /* What is gathered was folded of what was scattered. */
        for (int i = 0; i < peers; i++)
            while (peer[i].received < (half + 1) * part) {
                struct peer *q = &peer[i];
                size_t into = (q->first + q->received) % n, room = n - into < PIECE ? n - into : PIECE, left = q->bytes - q->received;
                ssize_t got = recv(q->from, incoming + into, left < room ? left : room, 0);
                if (got <= 0) fail("recv");
                q->received += got;
            }
    }
}

int main(int argc, char **argv) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int world = argc > 2 ? atoi(argv[2]) : 0, rank = argc > 2 ? atoi(argv[1]) : 0, on = 1;
    if (world < 2 || world > MOST || rank < 0 || rank >= world || argc != 6 + world) {
        fprintf(stderr, "usage: %s RANK WORLD BYTES,BYTES... PATTERN PORT ADDRESS...\n", argv[0]);
        return 2;
    }
    int ring = !strcmp(argv[4], "ring"), port = atoi(argv[5]);
    /* rotation-PIECE-STRICT-UNACKED */
    long piece = 0, strict = 0, unacked = -1;
    int rotation = sscanf(argv[4], "rotation-%ld-%ld-%ld", &piece, &strict, &unacked) > 0;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in mine = address(argv[6 + rank], port);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (listener < 0 || bind(listener, (struct sockaddr *)&mine, sizeof mine) || listen(listener, MOST)) fail("listen");
    struct peer peer[MOST];
    /* Ring: one connection to the successor and one from the predecessor. Mesh: one with everybody for both directions, dialled
     * by the lower rank, who is told apart by the first byte. */
    int peers = ring ? 1 : world - 1, expected = ring ? 1 : rank;
    for (int k = 0; k < peers; k++) {
        int other = (rank + 1 + k) % world;
        char me = rank;
        if (!ring && other < rank) continue;
        peer[k].to = connect_to(argv[6 + other], port);
        if (!ring) peer[k].from = peer[k].to;
        if (send(peer[k].to, &me, 1, MSG_NOSIGNAL) != 1) fail("send");
    }
    for (int k = 0; k < expected; k++) {
        int from = accept(listener, NULL, NULL);
        char who = 0;
        if (from < 0 || recv(from, &who, 1, MSG_WAITALL) != 1) fail("accept");
        setsockopt(from, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct peer *q = &peer[ring ? 0 : (who - rank - 1 + world) % world];
        q->from = from;
        if (!ring) q->to = from;
    }
    for (char *size = strtok(argv[3], ","); size; size = strtok(NULL, ",")) {
        size_t n = strtoull(size, NULL, 10);
        double us[ROUNDS];
        outgoing = malloc(n), incoming = malloc(n);
        if (!n || !outgoing || !incoming) fail("malloc");
        memset(outgoing, 1, n);
        memset(incoming, 1, n);
        for (int i = 0; i < peers; i++) {
            peer[i].bytes = 2 * (world - 1) * n / world / peers;
            peer[i].first = n / peers * i;
        }
        size_t most = piece > 0 ? (size_t)piece : n;
        if (rotation) rotate(peer, peers, n, most, strict, unacked); else exchange(peer, peers, n);
        for (int k = 0; k < ROUNDS; k++) {
            double began = now_us();
            if (rotation) rotate(peer, peers, n, most, strict, unacked); else exchange(peer, peers, n);
            us[k] = now_us() - began;
        }
        qsort(us, ROUNDS, sizeof *us, ascending);
        if (rank == 0) printf("{\"op\": \"%s-ceiling\", \"bytes\": %zu, \"median_us\": %.3f}\n", argv[4], n, us[ROUNDS / 2]);
        free(outgoing), free(incoming);
    }
    return 0;
}
