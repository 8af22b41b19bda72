#!/usr/bin/env python3
"""Compares what README, the guide and docs/ show of commands with what the commands print.

    tools/ci/readme.py [--phalanx target/release/phalanx]

README's first command runs in an empty folder. Its block on the page must have the lines that the command prints, but for
times, speeds, dates and the processor. Each accuracy (`accuracy=0.9890`) and each digest (`6c575c41665f…`) on any page must
be one that the command prints at its end; a number of lines of an example must be that of its file. Each difference is
told with page and line. Exits 1 if there is one.
"""

import argparse
import errno
import fcntl
import glob
import os
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIRST = "cargo run --release -- "
# What differs between runs and machines, by what stands for it.
VARIES = [
    (r"\x1b\[[0-9;]*[A-Za-z]", ""),
    (r"\d+ threads? each of \d+ cores? \([^)]*\)", "N threads each of N cores (ISA)"),
    (r"[━╸╺─]+", "BAR"),
    (r"\b\d+ %\s+\d+/", "N % N/"),
    (r"[\d,]+ images/s", "N images/s"),
    (r"loss \d+\.\d+", "loss N"),
    (r"\d+:\d\d left", "N left"),
    (r"runs/mnist-[\d-]+", "runs/RUN"),
    (r"^epoch \d+/", "epoch N/"),
    (r" +", " "),
]
FACT = re.compile(r"accuracy=0\.\d+|test_loss=\d+\.\d+|\b[0-9a-f]{12}…")
EXAMPLE = re.compile(r"\(((?:\.\./)*crates/[\w/]+\.rs)\)[^.]*? in (\d+) lines")


def shape(line):
    for what, instead in VARIES:
        line = re.sub(what, instead, line)
    return line.strip()


def on_terminal(words, folder):
    """Runs a command on a terminal of 120 columns, as the page has it, for at most ten minutes. Returns its exit status and
    what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm-256color"}
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))
    words = ["timeout", "600", *words]
    child = subprocess.Popen(words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError as error:
            # The other side is closed.
            if error.errno != errno.EIO:
                raise
            part = b""
        if not part:
            return child.wait(), output.decode(errors="replace")
        output += part


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--phalanx", default=ROOT / "target/release/phalanx")
    phalanx = Path(parser.parse_args().phalanx).resolve()
    readme = (ROOT / "README.md").read_text().splitlines()
    command = next(line for line in readme if line.startswith(FIRST))
    words = command.removeprefix(FIRST).split("#")[0].split()
    with tempfile.TemporaryDirectory() as folder:
        status, output = on_terminal([phalanx, *words], folder)
    if status != 0:
        sys.exit(f"{command}\nended with {status}:\n{output}")
    said = re.split(r"[\r\n]+", output)
    shapes = {shape(line) for line in said}
    # Those of the last epoch.
    facts = set({fact.split("=")[0]: fact for fact in FACT.findall(output)}.values())

    wrong = []
    first = next(i for i, line in enumerate(readme) if line.startswith("```text"))
    for i, line in enumerate(readme[first + 1:], first + 2):
        if line == "```":
            break
        if shape(line) not in shapes:
            wrong.append(f"README.md:{i}: the command does not print: {line}")
    pages = ["README.md", *sorted(glob.glob("docs/**/*.md", recursive=True, root_dir=ROOT))]
    for page in pages:
        text = (ROOT / page).read_text()
        for i, line in enumerate(text.splitlines(), 1):
            wrong += [f"{page}:{i}: the command does not print {fact}" for fact in FACT.findall(line) if fact not in facts]
        for shown in EXAMPLE.finditer(text):
            code = ((ROOT / page).parent / shown[1]).read_text().splitlines()
            lines = sum(1 for line in code if line.strip() and not line.strip().startswith("//"))
            if lines != int(shown[2]):
                line = text[:shown.start()].count("\n") + 1
                wrong.append(f"{page}:{line}: {shown[1]} has {lines} lines, not {shown[2]}")
    print("\n".join(["the command prints:", *(line for line in said if FACT.search(line))]))
    print("\n".join(wrong) or f"{len(pages)} pages show what the command prints")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
