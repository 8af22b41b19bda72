"""Hosts that are network namespaces on a shaped wire, for wire.py; needs root.

Every host is a network namespace whose only way out is a veth pair into a
switch, a namespace of its own. Both ends of each pair are shaped with
`tc ... tbf`: one limits what the host sends, the other what it receives, as
a full-duplex network card does.

Two hosts may be joined by a *cable* instead: one veth pair, shaped where each host sends. Nothing plays a
switch then on the cores that the ranks compute on.

With a delay the switch is a program of ours (peers/delay.c, compiled with cc)
that holds every frame for that time; it needs a core now and then, which the
ranks miss where cores are few.
"""
import os
import shlex
import signal
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAME = f"phw{os.getpid()}"
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


class Wire:
    """H hosts and a switch; the context manager removes them."""

    def __init__(self, hosts, gbit, delay_ms=0, mtu=1500, cable=False, burst_ms=0.2, congestion=None):
        if cable and (hosts != 2 or delay_ms):
            raise SystemExit("a cable joins two hosts, and holds nothing back")
        self.hosts, self.gbit, self.delay_ms, self.mtu, self.cable = hosts, gbit, delay_ms, mtu, cable
        self.burst_ms, self.congestion = burst_ms, congestion
        self.names, self.children, self.allowed = [], [], None

    def __enter__(self):
        try:
            self.allow()
            self.build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def namespace(self, name):
        sh("ip", "netns", "add", name)
        self.names.append(name)
        sh("ip", "-n", name, "link", "set", "lo", "up")
        if self.congestion:
            sh("ip", "netns", "exec", name, "sysctl", "-q", "-w", f"net.ipv4.tcp_congestion_control={self.congestion}")

    def allow(self):
        """A namespace may use only those congestion controls that the machine allows."""
        allowed = ALLOWED.read_text().strip()
        if self.congestion and self.congestion not in allowed.split():
            ALLOWED.write_text(f"{allowed} {self.congestion}")
            self.allowed = allowed

    def build(self):
        if self.cable:
            return self.build_cable()
        switch = f"{NAME}s"
        self.namespace(switch)
        if not self.delay_ms:
            sh("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
            sh("ip", "-n", switch, "link", "set", "br0", "up")
        for h in range(self.hosts):
            host, port = f"{NAME}h{h}", f"port{h}"
            self.namespace(host)
            sh("ip", "link", "add", "eth0", "netns", host, "mtu", str(self.mtu), "type", "veth",
               "peer", "name", port, "netns", switch, "mtu", str(self.mtu))
            sh("ip", "-n", host, "addr", "add", f"10.78.0.{h + 1}/24", "dev", "eth0")
            if not self.delay_ms:
                sh("ip", "-n", switch, "link", "set", port, "master", "br0")
            for ns, dev in ((host, "eth0"), (switch, port)):
                self.shape(ns, dev)
        if self.delay_ms:
            ports = [f"port{h}" for h in range(self.hosts)]
            relay = subprocess.Popen(["ip", "netns", "exec", switch, delay_switch(), str(1000 * self.delay_ms), *ports],
                                     stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
            self.children.append(relay)
            if relay.stdout.readline().strip() != "ready":
                raise SystemExit("the switch with a delay did not start")

    def build_cable(self):
        hosts = [f"{NAME}h{h}" for h in range(2)]
        for host in hosts:
            self.namespace(host)
        sh("ip", "link", "add", "eth0", "netns", hosts[0], "mtu", str(self.mtu), "type", "veth",
           "peer", "name", "eth0", "netns", hosts[1], "mtu", str(self.mtu))
        for h, host in enumerate(hosts):
            sh("ip", "-n", host, "addr", "add", f"10.78.0.{h + 1}/24", "dev", "eth0")
            self.shape(host, "eth0")

    def shape(self, ns, dev):
        sh("ip", "-n", ns, "link", "set", dev, "up")
        if self.gbit:
            # A burst of 0.2 ms, unless asked otherwise: long enough that late timers do not limit the rate, short enough that
            # little data gets through at the speed of memory. Packets must fit it. 4 MiB: a switch's buffer.
            burst = max(int(self.gbit * 1e9 / 8 * self.burst_ms * 1e-3), 5000)
            sh("ip", "-n", ns, "link", "set", dev, "gso_max_size", str(min(65536, burst * 2 // 3)))
            sh("tc", "-n", ns, "qdisc", "add", "dev", dev, "root", "tbf",
               "rate", f"{self.gbit:g}gbit", "burst", str(burst), "limit", "4mb")

    def start(self, host, cmd, env=None, **more):
        child = subprocess.Popen(["ip", "netns", "exec", f"{NAME}h{host}", *cmd], stdin=subprocess.DEVNULL,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                 env=dict(os.environ, **(env or {})), **more)
        self.children.append(child)
        return child

    def __exit__(self, *_):
        for name in self.names:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in pids:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.communicate() if child.stdout else child.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        if self.allowed is not None:
            ALLOWED.write_text(self.allowed)


def delay_switch():
    """The compiled switch."""
    return compiled("delay")


def compiled(name):
    """A program of peers/, for this run."""
    program = Path(tempfile.gettempdir()) / f"{NAME}-{name}"
    if not program.exists():
        sh("cc", "-O2", "-o", str(program), str(HERE / f"peers/{name}.c"))
    return str(program)


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
    finally:
        for left in Path(tempfile.gettempdir()).glob(f"{NAME}-*"):
            left.unlink(missing_ok=True)


def machine(congestion=None):
    """The cores and the system, for a summary; `congestion` is what the hosts were told to use."""
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    congestion = congestion or Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    system = os.uname()
    return (f"{os.cpu_count()} cores ({cpu}) for all hosts together, {system.sysname} {system.release}, "
            f"congestion control {congestion}")
