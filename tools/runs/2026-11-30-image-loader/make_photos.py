#!/usr/bin/env python3
"""make_photos.py FOLDER: 2,000 JPEG and PNG images of four classes, from 120 to 640 pixels wide; gray and alpha among them."""
import pathlib
import sys

import numpy as np
from PIL import Image

rng = np.random.default_rng(3)
root = pathlib.Path(sys.argv[1])
for number in range(2000):
    kind = number % 4
    h, w = (int(n) for n in rng.integers(120, 640, 2))
    y, x = np.mgrid[0:h, 0:w] / max(h, w)
    phase = rng.uniform(0, 6, 3)
    waves = [np.sin((4 + kind * 3) * (x * np.cos(p) + y * np.sin(p)) + p) for p in phase]
    pixels = np.stack([128 + 90 * wave for wave in waves], -1) + rng.normal(0, 6, (h, w, 3))
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    folder = root / f"kind{kind}"
    folder.mkdir(parents=True, exist_ok=True)
    if number % 10 == 0:
        image.convert("RGBA" if number % 20 else "L").save(folder / f"{number:04}.png")
    else:
        (image.convert("L") if number % 50 == 1 else image).save(folder / f"{number:04}.jpg", quality=int(rng.integers(75, 95)))
