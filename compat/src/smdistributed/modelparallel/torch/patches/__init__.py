"""What the library puts in the place of parts of PyTorch."""

from smdistributed.modelparallel.torch.patches import checkpoint

__all__ = ["checkpoint"]
