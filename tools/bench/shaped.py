"""Hosts that are network namespaces on a shaped wire, for wire.py; needs root.

Every host is a network namespace whose only way out is a veth pair into a
switch, a namespace of its own. Both ends of each pair are shaped with
`tc ... tbf`: one limits what the host sends, the other what it receives, as
a full-duplex network card does.

A delay is the kernel's (`tc ... netem`), where each host sends.
"""
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hosts import Hosts  # noqa: E402

ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


class Wire:
    """H hosts and a switch; the context manager removes them."""

    def __init__(self, hosts, gbit, delay_ms=0, mtu=1500, congestion=None):
        self.hosts, self.gbit, self.delay_ms, self.mtu, self.congestion = hosts, gbit, delay_ms, mtu, congestion
        self.children, self.allowed, self.net = [], None, None

    def __enter__(self):
        try:
            self.allow()
            self.net = Hosts(self.hosts, "10.78.0", self.mtu)
            for n, host in enumerate(self.net.names):
                if self.congestion:
                    sh(*self.net.prefix(n), "sysctl", "-q", "-w", f"net.ipv4.tcp_congestion_control={self.congestion}")
                if self.gbit:
                    self.shape(host, "eth0")
                    self.shape(self.net.switch, f"port{n}")
                if self.delay_ms:
                    below = ["parent", "1:1"] if self.gbit else ["root"]
                    sh("tc", "-n", host, "qdisc", "add", "dev", "eth0", *below, "netem", "delay", f"{self.delay_ms:g}ms", "limit", "100000")
        except BaseException:
            self.__exit__()
            raise
        return self

    def allow(self):
        """A namespace may use only those congestion controls that the machine allows."""
        allowed = ALLOWED.read_text().strip()
        if self.congestion and self.congestion not in allowed.split():
            ALLOWED.write_text(f"{allowed} {self.congestion}")
            self.allowed = allowed

    def shape(self, ns, dev):
        # A burst of 0.2 ms: long enough that late timers do not limit the rate, short enough that
        # little data gets through at the speed of memory. Packets must fit it. 4 MiB: a switch's buffer.
        burst = max(int(self.gbit * 1e9 / 8 * 2e-4), 5000)
        sh("ip", "-n", ns, "link", "set", dev, "gso_max_size", str(min(65536, burst * 2 // 3)))
        sh("tc", "-n", ns, "qdisc", "add", "dev", dev, "root", "handle", "1:", "tbf",
           "rate", f"{self.gbit:g}gbit", "burst", str(burst), "limit", "4mb")

    def start(self, host, cmd, env=None):
        child = subprocess.Popen([*self.net.prefix(host), *cmd], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True, env=dict(os.environ, **(env or {})))
        self.children.append(child)
        return child

    def __exit__(self, *_):
        if self.net:
            self.net.remove()
        for child in self.children:
            child.kill()
            child.communicate()
        if self.allowed is not None:
            ALLOWED.write_text(self.allowed)


def sh(*cmd):
    done = subprocess.run(cmd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(cmd)}: {done.stderr.strip()}")


def environment(wire, ranks_per_host=1):
    """Host of each rank and the variables that torchrun would set."""
    world = wire.hosts * ranks_per_host
    return [(r // ranks_per_host,
             {"RANK": str(r), "WORLD_SIZE": str(world), "LOCAL_RANK": str(r % ranks_per_host),
              "LOCAL_WORLD_SIZE": str(ranks_per_host), "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29500"}) for r in range(world)]


def run(wire, commands, timeout_s=300):
    """Runs (host, command, variables) at the same time; what each wrote, and the first failure as text or None."""
    children = [wire.start(h, cmd, env) for h, cmd, env in commands]
    out = [c.communicate(timeout=timeout_s) for c in children]
    wire.children = [c for c in wire.children if c not in children]
    failed = [f"{shlex.join(c.args)}: {err.strip()[-400:]}" for c, (_, err) in zip(children, out) if c.returncode]
    return [o[0] for o in out], failed[0] if failed else None


def until_interrupted(main):
    """Runs `main` so that everything made is removed again, also when somebody stops the script."""
    def interrupted(*_):
        raise KeyboardInterrupt

    for s in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(s, interrupted)
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def machine(congestion=None):
    """The cores and the system, for a summary; `congestion` is what the hosts were told to use."""
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    congestion = congestion or Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    system = os.uname()
    return (f"{os.cpu_count()} cores ({cpu}) for all hosts together, {system.sysname} {system.release}, "
            f"congestion control {congestion}")
