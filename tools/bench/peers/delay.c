/* A switch that holds every frame for a while, for wires with a delay where the kernel has no netem.
 *
 *     cc -O2 -o delay delay.c && ip netns exec SWITCH ./delay MICROSECONDS DEVICE DEVICE...
 *
 * Reads all frames that arrive at the devices and sends each, that many microseconds later, to the device behind which its
 * destination was seen, or to all others. What the kernel keeps together (segmentation offload) stays together, so the rate is that
 * of the devices' own queues. Says "ready" when it forwards; ends with a signal. Frames beyond 64 MiB under way are dropped and
 * counted, as are those that a device's queue does not take. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_packet.h>
#include <linux/virtio_net.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PORTS = 16, FRAME = 70000, RING = 64 << 20, ADDRESSES = 64 };

struct held { int64_t due_ns; uint32_t bytes; uint32_t from; };

static int port[PORTS], ports;
static struct { unsigned char mac[6]; int port; } known[ADDRESSES];
static int knowns;
static unsigned char *ring;
static uint64_t head, tail; /* bytes ever put in and taken out */
static volatile sig_atomic_t ended;

static void end(int signal) { (void)signal; ended = 1; }

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void fail(const char *what) { perror(what); exit(1); }

static int behind(const unsigned char *mac) {
    for (int i = 0; i < knowns; i++)
        if (!memcmp(known[i].mac, mac, 6)) return known[i].port;
    return -1;
}

static void learn(const unsigned char *mac, int from) {
    if (behind(mac) >= 0 || knowns == ADDRESSES) return;
    memcpy(known[knowns].mac, mac, 6);
    known[knowns++].port = from;
}


int main(int argc, char **argv) {
    if (argc < 4 || argc - 2 > PORTS) { fprintf(stderr, "usage: delay MICROSECONDS DEVICE DEVICE...\n"); return 2; }
    const int64_t delay_ns = (int64_t)(atof(argv[1]) * 1000);
    ring = malloc(RING);
    if (!ring) fail("malloc");
    prctl(PR_SET_TIMERSLACK, 1);
    struct sigaction action = {.sa_handler = end};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    for (; ports < argc - 2; ports++) {
        const int one = 1, much = 32 << 20;
        int s = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, htons(ETH_P_ALL));
        if (s < 0) fail("socket");
        struct sockaddr_ll at = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL),
                                 .sll_ifindex = (int)if_nametoindex(argv[2 + ports])};
        if (!at.sll_ifindex) fail(argv[2 + ports]);
        if (setsockopt(s, SOL_PACKET, PACKET_VNET_HDR, &one, sizeof one)) fail("PACKET_VNET_HDR");
        setsockopt(s, SOL_PACKET, PACKET_IGNORE_OUTGOING, &one, sizeof one);
        setsockopt(s, SOL_SOCKET, SO_RCVBUFFORCE, &much, sizeof much);
        setsockopt(s, SOL_SOCKET, SO_SNDBUFFORCE, &much, sizeof much);
        if (bind(s, (struct sockaddr *)&at, sizeof at)) fail("bind");
        struct packet_mreq all = {.mr_ifindex = at.sll_ifindex, .mr_type = PACKET_MR_PROMISC};
        if (setsockopt(s, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &all, sizeof all)) fail("promiscuous");
        port[ports] = s;
    }
    printf("ready\n");
    fflush(stdout);
    const size_t most = sizeof(struct held) + FRAME;
    uint64_t forwarded = 0, dropped = 0;
    while (!ended) {
        /* What is due goes out. Each frame and its header lie in one piece: where they might not fit at the end, the ring is left. */
        int64_t now = now_ns();
        while (tail < head) {
            if (RING - tail % RING < most) { tail += RING - tail % RING; continue; }
            unsigned char *at = ring + tail % RING;
            struct held held;
            memcpy(&held, at, sizeof held);
            if (held.due_ns > now) break;
            const unsigned char *frame = at + sizeof held;
            const unsigned char *mac = frame + sizeof(struct virtio_net_hdr);
            int to = behind(mac);
            for (int i = 0; i < ports; i++) {
                if (i == (int)held.from || (to >= 0 && to != i)) continue;
                if (send(port[i], frame, held.bytes, 0) < 0) dropped++;
                else forwarded++;
            }
            tail += (sizeof held + held.bytes + 15) & ~(uint64_t)15;
        }
        /* What has come is held. */
        int came = 0;
        for (int i = 0; i < ports; i++) {
            for (int turn = 0; turn < 16; turn++) {
                if (RING - head % RING < most) head += RING - head % RING;
                unsigned char spare[FRAME];
                const int fits = head - tail + 2 * most <= RING;
                unsigned char *at = ring + head % RING;
                unsigned char *into = fits ? at + sizeof(struct held) : spare;
                ssize_t bytes = recv(port[i], into, FRAME, 0);
                if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) break;
                if (bytes < 0) { if (errno == ENETDOWN) break; fail("recv"); }
                came = 1;
                if (!fits || bytes < (ssize_t)(sizeof(struct virtio_net_hdr) + 14)) { dropped++; continue; }
                learn(into + sizeof(struct virtio_net_hdr) + 6, i);
                struct held held = {now_ns() + delay_ns, (uint32_t)bytes, (uint32_t)i};
                memcpy(at, &held, sizeof held);
                head += (sizeof held + (size_t)bytes + 15) & ~(uint64_t)15;
            }
        }
        if (came) continue;
        /* Sleep until something is due or comes. */
        struct timespec left = {3600, 0};
        if (tail < head) {
            uint64_t first = RING - tail % RING < most ? tail + RING - tail % RING : tail;
            if (first < head) {
                struct held held;
                memcpy(&held, ring + first % RING, sizeof held);
                int64_t ns = held.due_ns - now_ns();
                if (ns <= 0) continue;
                left = (struct timespec){ns / 1000000000, ns % 1000000000};
            }
        }
        struct pollfd fds[PORTS];
        for (int i = 0; i < ports; i++) fds[i] = (struct pollfd){port[i], POLLIN, 0};
        ppoll(fds, ports, &left, NULL);
    }
    fprintf(stderr, "delay: %llu frames forwarded, %llu dropped\n", (unsigned long long)forwarded, (unsigned long long)dropped);
    return 0;
}
