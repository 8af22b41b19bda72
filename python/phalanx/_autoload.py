"""PyTorch calls ``autoload`` at the end of ``import torch``."""

import os


def autoload():
    """Puts the back end in Gloo's place where ``PHALANX_AS_GLOO`` is set."""
    if os.environ.get("PHALANX_AS_GLOO", "0") not in ("", "0"):
        import phalanx.torch  # noqa: F401
