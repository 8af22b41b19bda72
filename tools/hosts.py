"""What the drivers of tools/bench and tools/ci share: hosts that are network namespaces (needs root), and the processes of a job."""
import contextlib
import os
import signal
import subprocess
import time


def processes(mark):
    """Number and variables of each living process with the variable `mark`, which is "NAME=value"."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = file.read().split(b"\0")
        except OSError:
            continue
        if mark.encode() in variables:
            yield int(name), dict(v.split(b"=", 1) for v in variables if b"=" in v)


def ip(*args):
    subprocess.run(["ip", *args], check=True, stdout=subprocess.DEVNULL)


class Hosts:
    """This host, or network namespaces that a bridge in one more joins: host n has the address NETWORK.(n + 1) at its device eth0."""

    def __init__(self, count, network="10.79.0", mtu=1500):
        self.names = [f"phx-{os.getpid()}-{n}" for n in range(count)] if count > 1 else []
        self.switch = f"phx-{os.getpid()}-s"
        self.address = [f"{network}.{n + 1}" for n in range(count)]
        if not self.names:
            return
        try:
            ip("netns", "add", self.switch)
            ip("-n", self.switch, "link", "add", "name", "br0", "mtu", str(mtu), "type", "bridge")
            ip("-n", self.switch, "link", "set", "br0", "up")
            for n, name in enumerate(self.names):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
                ip("link", "add", "name", f"port{n}", "netns", self.switch, "mtu", str(mtu), "type", "veth", "peer", "name", "eth0", "netns", name,
                   "mtu", str(mtu))
                ip("-n", self.switch, "link", "set", f"port{n}", "master", "br0", "up")
                ip("-n", name, "addr", "add", f"{self.address[n]}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
        except BaseException:
            self.remove()
            raise

    def prefix(self, n):
        return ["ip", "netns", "exec", self.names[n]] if self.names else []

    def link(self, n, state):
        """Takes the link of host `n` "down": addresses and routes stay, packets vanish. Or "up" again, and waits for the carrier."""
        ip("-n", self.switch, "link", "set", f"port{n}", state)
        probe = [*self.prefix(n), "cat", "/sys/class/net/eth0/operstate"]
        until = time.monotonic() + 2
        while state == "up" and time.monotonic() < until and "up" not in subprocess.run(probe, capture_output=True, text=True).stdout:
            time.sleep(0.01)

    def signal_all(self, n, number):
        pids = subprocess.run(["ip", "netns", "pids", self.names[n]], capture_output=True, text=True).stdout.split()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), number)

    def remove(self):
        for n, name in enumerate(self.names):
            self.signal_all(n, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        if self.names:
            subprocess.run(["ip", "netns", "del", self.switch], check=False, capture_output=True)
