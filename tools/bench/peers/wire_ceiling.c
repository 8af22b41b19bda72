/* The most that a wire and these cores carry for an all-reduce, without the all-reduce.
 *
 *     cc -O2 -o wire_ceiling wire_ceiling.c && ./wire_ceiling RANK WORLD BYTES,BYTES... PATTERN PORT ADDRESS_OF_0 ADDRESS_OF_1 ...
 *
 * Every process sends 2(WORLD - 1)/WORLD * BYTES to its successor and receives as many from its predecessor at the same time
 * (PATTERN ring), or the same bytes in equal parts to and from everybody (mesh, one TCP connection a pair), in pieces of at most 1 MiB,
 * from and to memory of BYTES each, as an all-reduce must: nothing is framed, folded or waited for but bytes.
 * PATTERN rotation-PIECE-STRICT-UNACKED is the mesh's traffic to one peer at a time, see rotate; PATTERN staged-SEGMENT-LAG-ring and
 * -mesh are chunk owners as an all-reduce has them, each segment gathered after it has come from all, see stage. Prints one JSON line
 * a size, the median of the times of the rounds after the first. Gives up after 60 s without a byte.
 *
 * +OPTION behind a pattern (not rotation), several if wanted, changes how bytes leave and arrive:
 *   +splice      pages are lent to the socket (vmsplice, splice) instead of copied; they must not change until the peer has read them
 *   +sendfile    the same from a file in memory (memfd)
 *   +zerocopy    MSG_ZEROCOPY; its completions are read and thrown away
 *   +discard     what arrives is thrown away instead of copied (MSG_TRUNC): no all-reduce could, but it shows what the copy costs
 *   +into=N      what arrives goes into the same N bytes again and again, which so stay in a cache
 *   +piece=N     bytes a call at most, instead of 1 MiB
 *   +sndbuf=N, +rcvbuf=N   sizes of the sockets' buffers, instead of what the kernel finds
 *   +lowat=N     a receiver is woken when so many bytes have come (SO_RCVLOWAT), or all that are still to come
 *   +window=N    staged: a tick's segments leave when the tick N before is over
 *   +apart       staged: the ring has connections of its own */
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
#include <linux/errqueue.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/prctl.h>
#include <signal.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#ifndef ROUNDS
#define ROUNDS 31
#endif
enum { PIECE = 1 << 20, PATIENCE_MS = 60000, MOST = 64 };

static char *outgoing, *incoming; /* as long as the data */
static int outgoing_file = -1;    /* +sendfile: where outgoing is mapped from */

static struct { int splice, sendfile, zerocopy, discard, apart; long into, piece, sndbuf, rcvbuf, window, lowat; } option = {.piece = PIECE};

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

/* Buffers must be set before a connection is made: its windows follow from them. */
static int open_socket(void) {
    int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (s < 0) fail("socket");
    int sndbuf = option.sndbuf, rcvbuf = option.rcvbuf;
    if (sndbuf && setsockopt(s, SOL_SOCKET, SO_SNDBUFFORCE, &sndbuf, sizeof sndbuf)) fail("SO_SNDBUFFORCE");
    if (rcvbuf && setsockopt(s, SOL_SOCKET, SO_RCVBUFFORCE, &rcvbuf, sizeof rcvbuf)) fail("SO_RCVBUFFORCE");
    return s;
}

static void settle(int s) {
    int on = 1;
    setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (option.zerocopy && setsockopt(s, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on)) fail("SO_ZEROCOPY");
}

static int connect_to(const char *text, int port) {
    struct sockaddr_in a = address(text, port);
    for (double until = now_us() + PATIENCE_MS * 1e3;;) {
        int s = open_socket();
        if (!connect(s, (struct sockaddr *)&a, sizeof a)) {
            settle(s);
            return s;
        }
        close(s);
        if (now_us() > until) fail("connect");
        usleep(5000);
    }
}

struct peer { int to, from; size_t bytes, first, sent, received; int pipe[2]; size_t lent; int lowat; };

/* Completions would end every poll. */
static void drain_completions(int s) {
    char told[256];
    struct msghdr m = {.msg_control = told, .msg_controllen = sizeof told};
    while (recvmsg(s, &m, MSG_ERRQUEUE | MSG_DONTWAIT) >= 0) m.msg_controllen = sizeof told;
}

/* Up to `bytes` of what arrives from `q`, for incoming + at; how many came. */
static size_t get(struct peer *q, size_t at, size_t bytes) {
    if (bytes > (size_t)option.piece) bytes = option.piece;
    if (option.into) {
        at %= option.into;
        if (bytes > option.into - at) bytes = option.into - at;
    }
    ssize_t got = recv(q->from, incoming + at, bytes, MSG_DONTWAIT | (option.discard ? MSG_TRUNC : 0));
    if (got == 0) { fprintf(stderr, "a peer is gone\n"); exit(1); }
    if (got < 0 && errno != EAGAIN && errno != EINTR) fail("recv");
    return got > 0 ? got : 0;
}

/* Up to `bytes` from outgoing + at to `q`, always from where the call before ended; how many have left. */
static size_t put(struct peer *q, size_t at, size_t bytes) {
    ssize_t put;
    if (bytes > (size_t)option.piece) bytes = option.piece;
    if (option.sendfile) {
        off_t from = at;
        put = sendfile(q->to, outgoing_file, &from, bytes);
    } else if (option.splice) {
        if (q->lent < bytes) {
            struct iovec pages = {outgoing + at + q->lent, bytes - q->lent};
            ssize_t lent = vmsplice(q->pipe[1], &pages, 1, SPLICE_F_NONBLOCK);
            if (lent < 0 && errno != EAGAIN) fail("vmsplice");
            if (lent > 0) q->lent += lent;
        }
        put = splice(q->pipe[0], NULL, q->to, NULL, q->lent < bytes ? q->lent : bytes, SPLICE_F_MOVE | SPLICE_F_NONBLOCK);
        if (put > 0) q->lent -= put;
    } else {
        put = send(q->to, outgoing + at, bytes, MSG_DONTWAIT | MSG_NOSIGNAL | (option.zerocopy ? MSG_ZEROCOPY : 0));
        if (put < 0 && errno == ENOBUFS && option.zerocopy) errno = EAGAIN;
    }
    if (put < 0 && errno != EAGAIN && errno != EINTR) fail("send");
    return put > 0 ? put : 0;
}

static void wake_at(struct peer *q, size_t left) {
    int lowat = left < (size_t)option.lowat ? left : (size_t)option.lowat;
    if (q->lowat == lowat) return;
    if (setsockopt(q->from, SOL_SOCKET, SO_RCVLOWAT, &lowat, sizeof lowat)) fail("SO_RCVLOWAT");
    q->lowat = lowat;
}

static void await(struct pollfd *p, int wanted) {
    for (int i = 0; option.zerocopy && i < wanted; i++) drain_completions(p[i].fd);
    if (poll(p, wanted, PATIENCE_MS) == 0) { fprintf(stderr, "nothing moves\n"); exit(1); }
}

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
                size_t at = (q->first + q->received) % n, room = n - at, got = get(q, at, left < room ? left : room);
                q->received += got, moved |= got > 0;
            }
            left = q->bytes - q->sent;
            if (left) {
                size_t at = (q->first + q->sent) % n, room = n - at, out = put(q, at, left < room ? left : room);
                q->sent += out, moved |= out > 0;
            }
            if (option.lowat) wake_at(q, q->bytes - q->received);
            if (q->received < q->bytes) p[wanted++] = (struct pollfd){q->from, POLLIN, 0};
            if (q->sent < q->bytes) p[wanted++] = (struct pollfd){q->to, POLLOUT, 0};
        }
        if (!wanted) return;
        if (!moved) await(p, wanted);
    }
}

/* What goes one way between two, in order: `end` counts its bytes up to and with this step; `kind` says what must have come before it may
 * leave: nothing, segment `k` from everybody, or the step `k` of what the predecessor sends. */
enum kind { INPUT, OWN, PASSED_ON };
struct step { enum kind kind; int k, tick; size_t at, bytes, end; };
struct stream { struct step *steps; int count, done; };

static void push(struct stream *s, enum kind kind, int k, int tick, size_t at, size_t bytes) {
    s->steps = realloc(s->steps, (s->count + 1) * sizeof *s->steps);
    if (!s->steps) fail("realloc");
    size_t before = s->count ? s->steps[s->count - 1].end : 0;
    s->steps[s->count++] = (struct step){kind, k, tick, at, bytes, before + bytes};
}

struct staging { int segments, ticks; struct stream in[MOST], out[MOST]; int *from_all[MOST]; };

/* Chunk owners: tick t scatters segment t of every chunk to its owner, and gathers segment t - lag of every chunk: each owner sends it to
 * everybody (peers in order rank + 1, ...), or round the ring, where hop h of segment t - lag - h goes at tick t. The ring is what goes to
 * the successor (the last peer's `from` is the predecessor), or, apart, peer `world - 1`. */
static struct staging staged(int rank, int world, size_t n, size_t segment, int lag, int ring) {
    struct staging s = {0};
    size_t chunk = n / world;
    s.segments = (chunk + segment - 1) / segment;
    s.ticks = s.segments + lag + (ring ? world - 2 : 0);
    int to_next = option.apart ? world - 1 : 0, from_previous = option.apart ? world - 1 : world - 2;
    for (int i = 0; i < world; i++) s.from_all[i] = malloc(s.segments * sizeof(int));
    /* Where a hop of a segment is in what the predecessor sends. */
    int *place = malloc(world * s.segments * sizeof(int));
    for (int t = 0; t < s.ticks; t++) {
#define BYTES(k) ((k) == s.segments - 1 ? chunk - (k) * segment : segment)
        for (int i = 0; t < s.segments && i < world - 1; i++) {
            int other = (rank + 1 + i) % world;
            push(&s.out[i], INPUT, 0, t, other * chunk + t * segment, BYTES(t));
            push(&s.in[i], INPUT, 0, t, rank * chunk + t * segment, BYTES(t));
            s.from_all[i][t] = s.in[i].count - 1;
        }
        for (int h = 0; h < (ring ? world - 1 : 1); h++) {
            int k = t - lag - h;
            if (k < 0 || k >= s.segments) continue;
            if (!ring) {
                for (int i = 0; i < world - 1; i++) {
                    push(&s.out[i], OWN, k, t, rank * chunk + k * segment, BYTES(k));
                    push(&s.in[i], INPUT, 0, t, (rank + 1 + i) % world * chunk + k * segment, BYTES(k));
                }
                continue;
            }
            size_t mine = (rank - h + world) % world * chunk + k * segment, theirs = (rank - 1 - h + 2 * world) % world * chunk + k * segment;
            push(&s.out[to_next], h ? PASSED_ON : OWN, h ? place[(h - 1) * s.segments + k] : k, t, mine, BYTES(k));
            push(&s.in[from_previous], INPUT, 0, t, theirs, BYTES(k));
            place[h * s.segments + k] = s.in[from_previous].count - 1;
        }
    }
    free(place);
    return s;
}

static void stage(struct staging *s, struct peer *peer, int peers, int world) {
    int from_previous = option.apart ? world - 1 : world - 2;
    for (int i = 0; i < peers; i++) peer[i].sent = peer[i].received = s->in[i].done = s->out[i].done = 0;
    for (;;) {
        int moved = 0, wanted = 0, over = s->ticks;
        struct pollfd p[2 * MOST];
        for (int i = 0; i < peers; i++) {
            struct stream *in = &s->in[i], *out = &s->out[i];
            if (in->done < in->count && in->steps[in->done].tick < over) over = in->steps[in->done].tick;
            if (out->done < out->count && out->steps[out->done].tick < over) over = out->steps[out->done].tick;
        }
        for (int i = 0; i < peers; i++) {
            struct stream *in = &s->in[i], *out = &s->out[i];
            while (in->done < in->count) {
                struct step *step = &in->steps[in->done];
                size_t left = step->end - peer[i].received, got = get(&peer[i], step->at + step->bytes - left, left);
                if (!got) break;
                peer[i].received += got, moved = 1;
                if (got == left) in->done++;
            }
            int held = 0;
            while (out->done < out->count && !held) {
                struct step *step = &out->steps[out->done];
                if (option.window && step->tick >= over + option.window) held = 1;
                if (step->kind == PASSED_ON) held |= s->in[from_previous].done <= step->k;
                for (int j = 0; step->kind == OWN && j < world - 1; j++) held |= s->in[j].done <= s->from_all[j][step->k];
                if (held) break;
                size_t left = step->end - peer[i].sent, gone = put(&peer[i], step->at + step->bytes - left, left);
                if (!gone) break;
                peer[i].sent += gone, moved = 1;
                if (gone == left) out->done++;
            }
            if (option.lowat) wake_at(&peer[i], in->done < in->count ? in->steps[in->done].end - peer[i].received : 0);
            if (in->done < in->count) p[wanted++] = (struct pollfd){peer[i].from, POLLIN, 0};
            if (out->done < out->count && !held) p[wanted++] = (struct pollfd){peer[i].to, POLLOUT, 0};
        }
        int left = 0;
        for (int i = 0; i < peers; i++) left += s->in[i].done < s->in[i].count || s->out[i].done < s->out[i].count;
        if (!left) return;
        if (!moved) await(p, wanted);
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

static void read_options(char *text) {
    char *save;
    for (char *o = strtok_r(text, "+", &save); o; o = strtok_r(NULL, "+", &save)) {
        if (!strcmp(o, "splice")) option.splice = 1;
        else if (!strcmp(o, "sendfile")) option.sendfile = 1;
        else if (!strcmp(o, "zerocopy")) option.zerocopy = 1;
        else if (!strcmp(o, "discard")) option.discard = 1;
        else if (!strcmp(o, "apart")) option.apart = 1;
        else if (sscanf(o, "into=%ld", &option.into) == 1) {}
        else if (sscanf(o, "piece=%ld", &option.piece) == 1) {}
        else if (sscanf(o, "sndbuf=%ld", &option.sndbuf) == 1) {}
        else if (sscanf(o, "rcvbuf=%ld", &option.rcvbuf) == 1) {}
        else if (sscanf(o, "lowat=%ld", &option.lowat) == 1) {}
        else if (sscanf(o, "window=%ld", &option.window) == 1) {}
        else { fprintf(stderr, "unknown option: +%s\n", o); exit(2); }
    }
}

/* `n` bytes to send. */
static char *lendable(size_t n) {
    if (!option.sendfile) return malloc(n);
    outgoing_file = memfd_create("outgoing", MFD_CLOEXEC);
    if (outgoing_file < 0 || ftruncate(outgoing_file, n)) fail("memfd");
    char *at = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, outgoing_file, 0);
    return at == MAP_FAILED ? NULL : at;
}

int main(int argc, char **argv) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGPIPE, SIG_IGN);
    int world = argc > 2 ? atoi(argv[2]) : 0, rank = argc > 2 ? atoi(argv[1]) : 0, on = 1;
    if (world < 2 || world >= MOST || rank < 0 || rank >= world || argc != 6 + world) {
        fprintf(stderr, "usage: %s RANK WORLD BYTES,BYTES... PATTERN PORT ADDRESS...\n", argv[0]);
        return 2;
    }
    char *name = strdup(argv[4]), *options = strchr(argv[4], '+');
    if (options) *options = 0, read_options(options + 1);
    int ring = !strcmp(argv[4], "ring"), port = atoi(argv[5]);
    /* rotation-PIECE-STRICT-UNACKED */
    long piece = 0, strict = 0, unacked = -1;
    int rotation = sscanf(argv[4], "rotation-%ld-%ld-%ld", &piece, &strict, &unacked) > 0;
    /* staged-SEGMENT-LAG-GATHER */
    long segment = 0, lag = 0;
    char gather[8] = "";
    int in_stages = sscanf(argv[4], "staged-%ld-%ld-%7s", &segment, &lag, gather) == 3, round_ring = !strcmp(gather, "ring");
    if (!ring && !rotation && !in_stages && strcmp(argv[4], "mesh")) { fprintf(stderr, "unknown pattern: %s\n", argv[4]); return 2; }
    int listener = open_socket();
    struct sockaddr_in mine = address(argv[6 + rank], port);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&mine, sizeof mine) || listen(listener, MOST)) fail("listen");
    struct peer peer[MOST] = {0};
    /* Ring: one connection to the successor and one from the predecessor. Mesh: one with everybody for both directions, dialled
     * by the lower rank, who is told apart by the first byte. Apart: both, the ring's is the last. */
    int apart = in_stages && round_ring && option.apart, meshed = ring ? 0 : world - 1, peers = ring ? 1 : meshed + apart;
    int expected = ring ? 1 : rank + apart;
    option.apart = apart;
    for (int k = 0; k < peers; k++) {
        int alone = k >= meshed, other = (rank + 1 + (alone ? 0 : k)) % world;
        char me = alone ? rank | 64 : rank;
        if (!alone && other < rank) continue;
        peer[k].to = connect_to(argv[6 + other], port);
        if (!alone) peer[k].from = peer[k].to;
        if (send(peer[k].to, &me, 1, MSG_NOSIGNAL) != 1) fail("send");
    }
    for (int k = 0; k < expected; k++) {
        int from = accept(listener, NULL, NULL);
        char who = 0;
        if (from < 0 || recv(from, &who, 1, MSG_WAITALL) != 1) fail("accept");
        settle(from);
        int alone = ring || (who & 64);
        struct peer *q = &peer[alone ? meshed : (who - rank - 1 + world) % world];
        q->from = from;
        if (!alone) q->to = from;
    }
    for (int k = 0; k < peers; k++) {
        if ((option.splice || option.sendfile) && fcntl(peer[k].to, F_SETFL, O_NONBLOCK)) fail("fcntl");
        if (option.splice && (pipe2(peer[k].pipe, O_CLOEXEC | O_NONBLOCK) || fcntl(peer[k].pipe[1], F_SETPIPE_SZ, PIECE) < 0)) fail("pipe");
    }
    for (char *size = strtok(argv[3], ","); size; size = strtok(NULL, ",")) {
        size_t n = strtoull(size, NULL, 10);
        double us[ROUNDS];
        outgoing = lendable(n), incoming = malloc(n);
        if (!n || !outgoing || !incoming) fail("malloc");
        memset(outgoing, 1, n);
        memset(incoming, 1, n);
        for (int i = 0; i < peers; i++) {
            peer[i].bytes = 2 * (world - 1) * n / world / peers;
            peer[i].first = n / peers * i;
        }
        size_t most = piece > 0 ? (size_t)piece : n;
        struct staging s;
        if (in_stages) s = staged(rank, world, n, segment, lag, round_ring);
        for (int k = -1; k < ROUNDS; k++) {
            double began = now_us();
            if (rotation) rotate(peer, peers, n, most, strict, unacked);
            else if (in_stages) stage(&s, peer, peers, world);
            else exchange(peer, peers, n);
            if (k >= 0) us[k] = now_us() - began;
        }
        qsort(us, ROUNDS, sizeof *us, ascending);
        if (rank == 0) printf("{\"op\": \"%s-ceiling\", \"bytes\": %zu, \"median_us\": %.3f}\n", name, n, us[ROUNDS / 2]);
        if (option.sendfile) munmap(outgoing, n), close(outgoing_file); else free(outgoing);
        free(incoming);
    }
    return 0;
}
