"""``smp.optimizers``: optimizers for large batches, in plain PyTorch."""

from smdistributed.modelparallel.torch.optimizers.lamb import FusedLAMB
from smdistributed.modelparallel.torch.optimizers.novograd import FusedNovoGrad

FusedLamb = FusedLAMB

__all__ = ["FusedLAMB", "FusedLamb", "FusedNovoGrad"]
