"""Makes the images of this folder, and next to each what Pillow reads from it: `NAME.rgb`, rows of red, green and blue.

    pip install pillow torch torchvision numpy && python make.py

`t_*.rgb` are torchvision's transforms of `photo.png`.
"""
import os
import struct
import zlib

import numpy as np
from PIL import Image
from torchvision.transforms import functional as F

rng = np.random.default_rng(1)


def photo(h, w):
    y, x = np.mgrid[0:h, 0:w] / max(h, w)
    a = np.stack([128 + 100 * np.sin(6 * x + 3 * y), 128 + 90 * np.cos(5 * y - 2 * x), 128 + 80 * np.sin(9 * x * y + 1)], -1)
    a += rng.normal(0, 8, a.shape)
    a[h // 3:h // 2, w // 4:w // 2] = [220, 40, 30]
    return np.clip(a, 0, 255).astype(np.uint8)


small = photo(21, 29)
p = Image.fromarray(small)
for name, how in [("420", {"subsampling": 2}), ("422", {"subsampling": 1}), ("444", {"subsampling": 0}), ("progressive", {"progressive": True})]:
    p.save(f"{name}.jpg", **{"quality": 90, **how})
p.convert("L").save("gray.jpg", quality=90)
p.convert("CMYK").save("cmyk.jpg", quality=90)
exif = Image.Exif()
exif[0x112] = 6
p.save("turned.jpg", quality=90, exif=exif)
p.save("rgb.png")
p.convert("L").save("gray.png")
p.convert("LA").save("gray_alpha.png")
q = p.convert("RGBA")
q.putalpha(Image.fromarray(small[:, :, 0]))
q.save("rgba.png")
p.quantize(16).save("palette.png", transparency=3)
p.convert("1").save("bits.png")
deep = (small.astype(np.uint16) * 251 + 77).astype(">u2")
chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
head = struct.pack(">IIBBBBB", 29, 21, 16, 2, 0, 0, 0)
rows = b"".join(b"\0" + row.tobytes() for row in deep)
open("rgb16.png", "wb").write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))
for name in sorted(os.listdir(".")):
    if name.endswith((".jpg", ".png")) and name != "photo.png":
        open(name + ".rgb", "wb").write(np.asarray(Image.open(name).convert("RGB")).tobytes())

big = Image.fromarray(photo(48, 64))
big.save("photo.png")
for name, result in {
    "resize": F.resize(big, 26),
    "resize_to": F.resize(big, [32, 20]),
    "center": F.center_crop(big, 28),
    "center_padded": F.center_crop(big, 53),
    "part": F.resized_crop(big, 5, 9, 31, 23, [20, 20]),
    "flip": F.hflip(big),
    "bright": F.adjust_brightness(big, 1.3),
    "dark": F.adjust_brightness(big, 0.6),
    "contrast": F.adjust_contrast(big, 1.4),
    "saturation": F.adjust_saturation(big, 0.3),
    "hue": F.adjust_hue(big, 0.2),
    "hue_back": F.adjust_hue(big, -0.35),
    "turn_20": F.rotate(big, 20),
    "turn_-133": F.rotate(big, -133),
}.items():
    open(f"t_{name}.rgb", "wb").write(np.asarray(result).tobytes())
