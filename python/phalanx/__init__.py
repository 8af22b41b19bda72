"""Phalanx for Python: ``phalanx.torch`` is a back end of ``torch.distributed`` for CPU tensors."""
