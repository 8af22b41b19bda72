"""The back end under ``torch.distributed``. Usage: python -m unittest discover python/tests

Each test starts its ranks as processes, which meet in a file.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))


def ranks(name, world, **env):
    """The exit codes and outputs of ``world`` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "store")
        command = [sys.executable, os.path.join(HERE, "ranks.py"), name]
        started = [
            subprocess.Popen([*command, str(rank), str(world), file], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **env})
            for rank in range(world)
        ]
        try:
            return [(process.communicate(timeout=200)[0], process.returncode) for process in started]
        finally:
            for process in started:
                process.kill()


class Ranks(unittest.TestCase):
    def check(self, name, worlds=(1, 2, 3), dead=None, **env):
        for world in worlds:
            for rank, (output, code) in enumerate(ranks(name, world, **env)):
                with self.subTest(world=world, rank=rank):
                    if rank == dead:
                        self.assertEqual(code, -9, output)
                    else:
                        self.assertEqual(code, 0, output)
                        self.assertIn("ok", output)


class Torch(Ranks):
    def test_reductions(self):
        self.check("test_reductions")

    def test_moves(self):
        self.check("test_moves")

    def test_messages(self):
        self.check("test_messages")

    def test_handles(self):
        self.check("test_handles")

    def test_coalesced(self):
        self.check("test_coalesced")

    def test_ddp(self):
        self.check("test_ddp")

    def test_shared(self):
        self.check("test_shared")

    def test_shared_buckets(self):
        self.check("test_shared_buckets")

    def test_flight(self):
        self.check("test_flight", (2,))

    def test_sharded(self):
        self.check("test_sharded")

    def test_groups(self):
        self.check("test_groups")

    def test_futures(self):
        self.check("test_futures")

    def test_again(self):
        self.check("test_again")

    def test_parts(self):
        self.check("test_parts", (2, 3))

    def test_sizes(self):
        self.check("test_sizes", (5,))

    def test_absent(self):
        self.check("test_absent", (3,))

    def test_numbers(self):
        self.check("test_numbers", (2, 3))

    def test_raises(self):
        for world in (2, 3):
            begun = time.monotonic()
            ended = ranks("test_raises", world)
            for rank, (output, code) in enumerate(ended):
                with self.subTest(world=world, rank=rank):
                    self.assertEqual(code, 1 if rank == 1 else 0, output)
                    self.assertIn("ValueError" if rank == 1 else "ok", output)
            self.assertLess(time.monotonic() - begun, 60)

    def test_mistakes(self):
        self.check("test_mistakes")

    def test_killed(self):
        self.check("test_killed", (2, 3), dead=1)

    def test_killed_in_backward(self):
        self.check("test_killed_in_backward", (2, 3), dead=1)

    def test_reconfigured(self):
        self.check("test_reconfigured", (2, 3, 4), dead=1)

    def test_late(self):
        self.check("test_late", (2, 3))


class Device(Ranks):
    """With tensors of a device whose copies come late."""

    @classmethod
    def setUpClass(cls):
        if shutil.which("g++") is None:
            raise unittest.SkipTest("the device of these tests is compiled with g++, which is not installed")
        import torch

        home, folder = os.path.dirname(torch.__file__), tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.library = os.path.join(folder.name, "late_device.so")
        include = [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include"]
        command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", *include, f"{HERE}/late_device.cpp", "-o", cls.library]
        subprocess.run([*command, f"-L{home}/lib", "-lc10", "-ltorch_cpu"], check=True)

    def check(self, *args, **named):
        super().check(*args, LATE_DEVICE=self.library, **named)

    def test_device(self):
        self.check("test_device", (1, 3), LATE_US="2000")

    def test_reductions(self):
        self.check("test_reductions", (2,))

    def test_moves(self):
        self.check("test_moves", (2,))

    def test_messages(self):
        self.check("test_messages", (3,))

    def test_coalesced(self):
        self.check("test_coalesced", (2,))

    def test_ddp(self):
        self.check("test_ddp", (2,))

    def test_futures(self):
        self.check("test_futures", (3,))

    def test_killed(self):
        self.check("test_killed", (3,), dead=1)

    def test_killed_in_backward(self):
        self.check("test_killed_in_backward", (3,), dead=1)


if __name__ == "__main__":
    unittest.main()
