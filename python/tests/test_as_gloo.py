"""The back end in Gloo's place. Usage: python -m unittest discover python/tests"""

import json
import os
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
PROGRAM = os.path.join(HERE, "unnamed.py")


def run(command, cwd=None, **env):
    """The output of a Python, and its exit code."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=cwd, timeout=300)
    return done.stdout, done.returncode


class AsGloo(unittest.TestCase):
    def job(self, before=(), **env):
        """What two ranks under torchrun have written."""
        with tempfile.TemporaryDirectory() as folder:
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            output, code = run([*torchrun, *before, folder, "--own", "argument"], **env)
            self.assertEqual(code, 0, output)
            return [json.load(open(os.path.join(folder, str(rank)))) for rank in range(2)]

    def test_results_are_gloos(self):
        wanted = self.job([PROGRAM])
        for kinds, _, _ in wanted:
            self.assertEqual(set(kinds.values()), {"ProcessGroupGloo"})
        switches = {
            "variable": lambda: self.job([PROGRAM], PHALANX_AS_GLOO="1"),
            "script": lambda: self.job(["-m", "phalanx.torch", PROGRAM]),
        }
        for name, switch in switches.items():
            with self.subTest(name):
                for rank, (kinds, got, arguments) in enumerate(switch()):
                    self.assertEqual(set(kinds.values()), {"PhalanxBackend"}, kinds)
                    self.assertEqual(got, wanted[rank][1])
                    self.assertEqual(arguments, ["--own", "argument"])

    def test_no_switch(self):
        for value in ("", "0"):
            text = "import sys, torch; print('phalanx.torch' in sys.modules)"
            self.assertEqual(run(["-W", "ignore", "-c", text], PHALANX_AS_GLOO=value), ("False\n", 0))

    def test_twice(self):
        text = "import phalanx.torch as p, torch.distributed as d; p.replace_gloo(); p.replace_gloo()\n"
        text += "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1); print(d.get_backend(), d.group.WORLD.name())"
        for value in ("0", "1"):
            self.assertEqual(run(["-W", "ignore", "-c", text], PHALANX_AS_GLOO=value), ("gloo phalanx\n", 0))

    def test_module(self):
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(os.path.join(folder, "package"))
            with open(os.path.join(folder, "package", "__main__.py"), "w") as file:
                file.write("import os, sys; print(__name__, __spec__.name, sys.argv[1:], sys.path[0] == os.getcwd())")
            output = run(["-W", "ignore", "-m", "phalanx.torch", "-m", "package", "-m", "x"], cwd=folder)
        self.assertEqual(output, ("__main__ package.__main__ ['-m', 'x'] True\n", 0))

    def test_usage(self):
        for arguments in ([], ["-m"]):
            output, code = run(["-W", "ignore", "-m", "phalanx.torch", *arguments])
            self.assertEqual((code, output.split()[0]), (1, "usage:"), output)


if __name__ == "__main__":
    unittest.main()
