#!/usr/bin/env python3
"""Draws the pictures of docs/guide/how-it-works.md: SVG files in light and dark, 440 points wide.

    tools/pictures.py [--check]

What a picture shows of a schedule is computed here: the ranks of a ring, of shared memory and of a product add real numbers,
and a wrong result ends the tool. The step is that of a `--profile` trace in tools/runs, the lost rank that of a run's
`events.jsonl` and `metrics.jsonl` there. The description of a picture is its alternative text on the page. --check writes
nothing, and exits 1 if a file differs from what would be written.
"""

import argparse
import itertools
import json
import math
import re
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, RUNS = ROOT / "docs/guide/how-it-works.md", ROOT / "tools/runs/2026-11-30-pictures"
WIDTH = 440
# Light and dark. Words are in "ink" or "soft", on any of the others.
COLORS = {"ground": ("#ffffff", "#0d1117"), "ink": ("#1f2328", "#e6edf3"), "soft": ("#4b535c", "#b3bcc6"),
          "grey": ("#e9ecef", "#2a3038"), "blue": ("#cfe4ff", "#1f4470"), "orange": ("#ffdfbd", "#63400f"),
          "green": ("#c9efd1", "#1d5130"), "violet": ("#e6d8ff", "#4a3680")}
RANKS = ["blue", "orange", "green"]


def style(which):
    return "".join(f".{name}{{fill:{colors[which]}}}.line-{name}{{stroke:{colors[which]}}}" for name, colors in COLORS.items())


class Picture:
    """Shapes, each with its color as class; as high as its lowest shape."""

    def __init__(self, title):
        self.title, self.parts, self.height = title, [], 0

    def add(self, bottom, shape):
        self.parts.append(shape)
        self.height = max(self.height, bottom)

    def text(self, x, y, words, anchor="middle", color="ink", bold=False):
        kind = color + " bold" * bold
        self.add(y + 6, f'<text x="{x:.4g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>')

    def label(self, y, words, under=""):
        self.text(12, y, words, "start", bold=True)
        if under:
            self.text(12, y + 19, under, "start", "soft")

    def box(self, x, y, width, height, color, words="", dashed=False):
        more = ' stroke-dasharray="4 3"' * dashed
        self.add(y + height, f'<rect x="{x:.4g}" y="{y:g}" width="{width:.4g}" height="{height:g}" rx="3" '
                             f'class="{color} line-soft"{more}/>')
        lines = words.split("\n") if words else []
        for i, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 5 + 18 * (i - (len(lines) - 1) / 2), line)

    def key(self, x, y, color, words):
        self.box(x, y, 20, 20, color)
        self.text(x + 28, y + 15, words, "start", "soft")

    def cells(self, x, y, rows, color, width=24, height=24):
        """A matrix; what is None is there in outline only."""
        for i, row in enumerate(rows):
            for j, value in enumerate(row):
                words, of_cell = ("", "ground") if value is None else (f"{value:g}", color if isinstance(color, str) else color[j])
                self.box(x + j * width, y + i * height, width, height, of_cell, words, dashed=value is None)

    def line(self, *points, both=False, tips=True, color="ink"):
        at = " ".join(f"{x:.4g},{y:.4g}" for x, y in points)
        more = ' marker-end="url(#tip)"' * tips + ' marker-start="url(#tip)"' * both
        self.add(max(y for _, y in points), f'<polyline points="{at}" class="line-{color}" fill="none"{more}/>')

    def svg(self, description):
        height = self.height + 10
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}" '
            'role="img" aria-labelledby="title desc">',
            f'<title id="title">{escape(self.title)}</title>', f'<desc id="desc">{escape(description)}</desc>',
            '<style>text{font:14px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}.bold{font-weight:bold}',
            f"{style(0)}@media (prefers-color-scheme:dark){{{style(1)}}}</style>",
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" class="ink"/></marker>',
            f'<rect width="{WIDTH}" height="{height:g}" rx="6" class="ground"/>', *self.parts, "</svg>", ""])


def three_ways():
    picture = Picture("One process, DataParallel and DistributedDataParallel")
    picture.label(24, "One process")
    picture.box(12, 34, 416, 62, "ground", dashed=True)
    for x, color, words in [(24, "grey", "samples\n1 to 6"), (168, "violet", "weights"), (312, "grey", "gradient")]:
        picture.box(x, 44, 104, 42, color, words)
    for began, ended, y in [(130, 166, 65), (274, 310, 58), (310, 274, 74)]:
        picture.line((began, y), (ended, y))
    picture.label(126, "DataParallel: one process, three threads")
    picture.box(12, 136, 416, 154, "ground", dashed=True)
    picture.box(120, 146, 200, 42, "violet", "master: weights,\noptimizer")
    for x, y, words in [(64, 208, "weights ↓"), (374, 208, "gradients ↑"), (220, 468, "↔ gradients")]:
        picture.text(x, y, words, color="soft")
    picture.label(320, "DistributedDataParallel: three processes")
    for rank, color in enumerate(RANKS):
        x, samples = 24 + 140 * rank, f"samples {2 * rank + 1}, {2 * rank + 2}"
        picture.box(x, 238, 112, 42, color, f"replica\n{samples}")
        picture.line((148 + 60 * rank, 190), (x + 44, 236))
        picture.line((x + 68, 236), (172 + 60 * rank, 190))
        x = 12 + 152 * rank
        picture.box(x, 330, 112, 118, "ground", dashed=True)
        picture.box(x + 4, 336, 104, 42, "violet", "weights,\noptimizer")
        picture.box(x + 4, 384, 104, 42, color, samples)
        picture.text(x + 56, 442, f"rank {rank}", color="soft")
        if rank:
            picture.line((x - 38, 357), (x - 2, 357), both=True)
    return picture


def average():
    samples = [([[1, 2], [2, 3]], [8, 13]), ([[4, 6], [3, 1]], [26, 9])]
    gradients = [[-2 * sum(x[i] * y for x, y in zip(*of_rank)) for i in range(2)] for of_rank in samples]
    mean = [sum(column) / 2 for column in zip(*gradients)]
    picture = Picture("Two ranks take one step")
    show = lambda values: "[" + ", ".join(f"{value:g}" for value in values) + "]"  # noqa: E731
    for rank, ((x, y), gradient) in enumerate(zip(samples, gradients)):
        left = 12 + 216 * rank
        picture.text(left + 100, 22, f"rank {rank}", bold=True)
        for top, height, color, words in [
                (32, 26, "violet", "w = [0, 0]"), (76, 46, RANKS[rank], "\n".join(f"x = {show(x)}, y = {y}" for x, y in zip(x, y))),
                (140, 26, RANKS[rank], f"gradient {show(gradient)}"),
                (248, 46, "violet", f"w = [0, 0] - 0.01 · average\n= {show([-0.01 * value for value in mean])}")]:
            picture.box(left, top, 200, height, color, words)
        for began, ended in [(58, 74), (122, 138)]:
            picture.line((left + 100, began), (left + 100, ended))
        picture.line((left + 100, 166), (150 + 140 * rank, 192))
        picture.line((150 + 140 * rank, 220), (left + 100, 246))
    picture.box(98, 194, 244, 26, "green", f"all-reduce: average {show(mean)}")
    return picture


# Each rank has a digit of its own, so a sum shows whose numbers are in it.
GRADIENTS = [[place * number for number in (1, 2, 3)] for place in (1, 10, 100)]
ADDED = {"of one rank": "grey", "of two": "orange", "complete": "green"}


def exchange(picture, steps):
    """Buckets of three ranks, three chunks each. A step is a label, its height, and the moves (from, to, chunk): what a rank has
    of a chunk is then the sum of what is moved there, its own included."""
    chunks, top = [list(own) for own in GRADIENTS], 32
    at = lambda rank, chunk: 109 + 118 * rank + 35 * chunk  # noqa: E731
    for label, height, moves in [("start", 0, []), *steps]:
        before, top = [list(own) for own in chunks], top + height
        for _, to, chunk in moves:
            chunks[to][chunk] = sum(before[rank][chunk] for rank, *place in moves if place == [to, chunk])
        for rank, to, chunk in moves:
            if rank != to:
                picture.line((at(rank, chunk), top - height + 31), (at(to, chunk), top - 1))
        picture.label(top + 11, *label.split(": "))
        for rank, own in enumerate(chunks):
            added = [list(ADDED.values())[sum(digit != "0" for digit in str(value)) - 1] for value in own]
            picture.cells(at(rank, 0) - 17, top, [own], added, 34, 30)
    for i, (words, color) in enumerate(ADDED.items()):
        picture.text(at(i, 1), 22, f"rank {i}", bold=True)
        if any(f'"{color} ' in part for part in picture.parts):
            picture.key(92 + 118 * i, top + 48, color, words)
    if any(own != [111, 222, 333] for own in chunks):
        sys.exit(f"{picture.title}: the ranks have {chunks}")
    return picture


def ring():
    # As crates/phalanx-comm/src/plan/all_reduce_ring.rs: rank r sends chunk r - step, and then what is complete.
    steps = []
    for step in range(4):
        sent = [(rank, (rank + 1) % 3, (rank - step + step // 2 * 3) % 3) for rank in range(3)]
        own = [(to, to, chunk) for _, to, chunk in sent if step < 2]
        steps.append((f"round {step + 1}: {'send, add' if step < 2 else 'send'}", 78, sent + own))
    return exchange(Picture("All-reduce of three ranks over a ring"), steps)


def shared_memory():
    pairs = list(itertools.product(range(3), range(3)))
    return exchange(Picture("All-reduce of three ranks of one host in shared memory"), [
        ("step 1: add", 92, [(rank, to, to) for rank, to in pairs]), ("step 2: copy", 92, [(rank, to, rank) for rank, to in pairs])])


def parallel():
    picture = Picture("Data, tensor and pipeline parallel on two ranks")
    whole, rows, columns = (0, 0, 1, 1), [(0, 0, 1, 0.5), (0, 0.5, 1, 0.5)], [(0, 0, 0.5, 1), (0.5, 0, 0.5, 1)]
    ways = [("Data parallel", "gradients, once a step", [[own, whole, whole] for own in rows]),
            ("Tensor parallel", "activations, after each pair of layers", [[whole, *own] for own in zip(columns, rows)]),
            ("Pipeline parallel", "activations and their gradients, between layers", [[whole, whole, None], [None, None, whole]])]
    for n, (name, sent, parts) in enumerate(ways):
        top, behind = 24 + 158 * n, None
        picture.label(top, name)
        for rank, of_rank in enumerate(parts):
            behind = behind if None in of_rank else None
            picture.text(16 + 220 * rank, top + 24, f"rank {rank}", "start", "soft")
            for x, width, words, part in zip([24, 90, 156], [40, 46, 46], ["samples", "layer 1", "layer 2"], of_rank):
                x += 220 * rank
                picture.text(x + width / 2, top + 105, words, color="soft")
                picture.box(x, top + 34, width, 54, "ground", dashed=True)
                if part:
                    picture.box(x + part[0] * width, top + 34 + part[1] * 54, part[2] * width, part[3] * 54, RANKS[rank])
                    if behind:
                        picture.line((behind + 2, top + 61), (x - 2, top + 61))
                    behind = x + width
        picture.text(12, top + 128, f"sent: {sent}", "start")
    return picture


def split(matrix, sbp, rank, ranks=2):
    """What a rank has of a matrix: None for each element that it has not."""
    has = lambda axis, place, count: sbp != f"S({axis})" or place * ranks // count == rank  # noqa: E731
    return [[value if has(0, i, len(matrix)) and has(1, j, len(row)) else None for j, value in enumerate(row)]
            for i, row in enumerate(matrix)]


def product(x, w):
    """The product of the parts of two matrices; None where a rank has nothing to add."""
    terms = [[[a * b for a, b in zip(row, column) if None not in (a, b)] for column in zip(*w)] for row in x]
    return [[sum(of_place) if of_place else None for of_place in row] for row in terms]


X, W = [[1, 2], [3, 4]], [[5, 6], [7, 8]]
Y = product(X, W)


def parts_of_y(of_x, of_w, of_y):
    parts = [product(split(X, of_x, rank), split(W, of_w, rank)) for rank in range(2)]
    added = [[sum(value or 0 for value in of_place) for of_place in zip(*rows)] for rows in zip(*parts)]
    if (added != Y) if of_y == "P" else any(part != split(Y, of_y, rank) for rank, part in enumerate(parts)):
        sys.exit(f"{of_x} and {of_w} give {parts}, not {of_y}")
    return parts


def sbp():
    picture = Picture("One matrix on two ranks: split, broadcast and partial sum")
    for x, words in [(190, "rank 0"), (282, "rank 1"), (386, "the matrix")]:
        picture.text(x, 22, words, bold=True)
    for n, (name, words, sign) in enumerate([("S(0)", "split: rows", ""), ("S(1)", "split: columns", ""), ("B", "broadcast", "="),
                                             ("P", "partial sum", "+")]):
        top = 34 + 76 * n
        picture.label(top + 24, name, words)
        parts = parts_of_y("S(1)", "S(0)", "P") if name == "P" else [split(Y, name, rank) for rank in range(2)]
        for x, part, color in [(158, parts[0], "blue"), (250, parts[1], "orange"), (354, Y, "green")]:
            picture.cells(x, top, part, color, 32, 30)
        picture.text(236, top + 35, sign)
    return picture


def boxing():
    picture = Picture("A product of two matrices on two ranks in three ways")
    for n, (of_x, of_w, of_y, words) in enumerate([
            ("S(0)", "B", "S(0)", "data parallel"), ("B", "S(1)", "S(1)", "tensor parallel, first layer"),
            ("S(1)", "S(0)", "P", "tensor parallel, second layer")]):
        top = 24 + 112 * n
        picture.label(top, f"X as {of_x}, W as {of_w}: Y is {of_y}", words)
        for rank, y in enumerate(parts_of_y(of_x, of_w, of_y)):
            for x, matrix, sign in [(12, split(X, of_x, rank), "·"), (78, split(W, of_w, rank), "="), (144, y, "")]:
                picture.cells(x + 214 * rank, top + 30, matrix, RANKS[rank], 25, 25)
                picture.text(x + 58 + 214 * rank, top + 60, sign)
    picture.label(360, "Boxing of Y from P to B: an all-reduce")
    for rank in range(2):
        picture.cells(12 + 214 * rank, 374, Y, "green", 25, 25)
        picture.text(76 + 214 * rank, 404, f"rank {rank}", "start", "soft")
    return picture


def axis(picture, y, began, ended, zero, every, unit):
    """Where a time is on a line from `began` to `ended`, which has a number each `every` before and after `zero`."""
    at = lambda time: 12 + 416 * (min(max(time, began), ended) - began) / (ended - began)  # noqa: E731
    picture.line((12, y), (428, y), tips=False, color="soft")
    for i in range(math.ceil((began - zero) / every), math.floor((ended - zero) / every) + 1):
        x = at(zero + i * every)
        picture.line((x, y), (x, y + 5), tips=False, color="soft")
        picture.text(max(x, 18), y + 21, f"{i * every:g}", color="soft")
    picture.text(428, y + 21, unit, "end", "soft")
    return at


def step():
    events = json.loads((RUNS / "trace.0.json").read_text())["traceEvents"]
    events = sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])
    spans = lambda kind, name, of_span: (kind, name, of_span[0]["ts"] / 1e3, (of_span[-1]["ts"] + of_span[-1]["dur"]) / 1e3)  # noqa: E731
    rank = [spans(event["name"], event["name"], [event]) for event in events if event["tid"] == 0]
    reduced = [spans("all-reduce", str(n), [event]) for n, event in enumerate(event for event in events if event["tid"] == 1)]
    layers = (event for event in events if event["tid"] == 2 and event["args"]["layer"])
    layers = itertools.groupby(layers, lambda event: (event["args"]["pass"], event["args"]["layer"].split(".")[0]))
    layers = [spans(*of_part, list(group)) for of_part, group in layers]
    began, ended = rank[0][2], rank[-1][3]
    picture = Picture(f"One step of a training on two ranks: {ended - began:.0f} ms on rank 0")
    at = axis(picture, 224, began, ended, began, 50, "ms")
    colors = {"forward": "blue", "backward": "orange", "all-reduce": "green", "optimizer": "violet"}
    for words, top, lane in [("rank 0", 24, rank), ("parts of the model", 90, layers), ("all-reduce of buckets", 156, reduced)]:
        picture.label(top, words)
        for kind, name, since, until in lane:
            width = at(until) - at(since)
            picture.box(at(since), top + 8, width, 32, colors.get(kind, "grey"), name if width > 8 * len(name) + 6 else "")
    picture.key(12, 260, "grey", "wait for gradients")
    picture.key(190, 260, "violet", "update of the weights")
    return picture


def elastic():
    events, metrics = [[json.loads(line) for line in (RUNS / name).read_text().splitlines()] for name in ("events.jsonl", "metrics.jsonl")]
    lost, joined = changes = [event for event in events if event["kind"] == "ranks"]
    killed = float((RUNS / "killed").read_text()) - events[0]["time"] + events[0]["elapsed_s"]
    ends = {record["step"]: record["elapsed_s"] for record in metrics}
    spans = [(ends[at - 1], end, "blue", 2 if lost["step"] < at < joined["step"] else 3) for at, end in ends.items()
             if at - 1 in ends and at not in (lost["step"], joined["step"])]
    for event in changes:
        times = [event[name] for name in ("noticed_s", "agreed_s", "state_s", "redone_s")]
        spans += [(*span, event["after"]) for span in zip(times, times[1:], ["orange", "green", "blue"])]
    picture = Picture("Rank 2 is killed, and a new process takes its place")
    at = axis(picture, 160, killed - 0.25, joined["redone_s"] + 0.15, killed, 0.2, "s")
    for rank in range(3):
        picture.label(24 + 46 * rank, f"rank {rank}")
        begun = (ends[lost["step"] - 1], killed if rank == 2 else lost["noticed_s"], "grey", 3)
        for since, until, color, ranks in [begun, *spans]:
            if rank < ranks and at(since) < at(until):
                picture.box(at(since), 30 + 46 * rank, at(until) - at(since), 22, color)
    picture.text(at(killed) + 8, 138, "killed", "start")
    took = lambda since, until: ", then ".join(f"{1e3 * (event[until] - event[since]):.0f} ms" for event in changes)  # noqa: E731
    for i, (color, words) in enumerate([("blue", "a step"), ("grey", "a step that was begun and not completed"),
                                        ("orange", f"form a new group: {took('noticed_s', 'agreed_s')}"),
                                        ("green", f"compare and copy the state: {took('agreed_s', 'state_s')}")]):
        picture.key(12, 196 + 26 * i, color, words)
    return picture


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    draw = (three_ways, average, step, ring, shared_memory, parallel, sbp, boxing, elastic)
    pictures = {function.__name__.replace("_", "-"): function() for function in draw}
    described = {name: words for words, name in re.findall(r"!\[(.+)\]\(pictures/(.+)\.svg\)", PAGE.read_text())}
    wrong = [f"{name} is not both on the page and in this tool" for name in pictures.keys() ^ described.keys()]
    for name in pictures.keys() & described.keys():
        file, text = PAGE.parent / f"pictures/{name}.svg", pictures[name].svg(described[name])
        if not check:
            file.write_text(text)
        elif not file.is_file() or file.read_text() != text:
            wrong.append(f"{file.relative_to(ROOT)} is not what tools/pictures.py draws")
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
