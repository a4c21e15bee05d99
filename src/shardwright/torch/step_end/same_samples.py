"""Warns where all replicas train on the same samples, as a data loader without a sampler gives them.

Nothing is wrong then with what is computed, but replicas beyond the first add nothing. Losses that are equal
to the last bit, of the first steps, show it; replicas with dropout, or other seeds, hide it.
"""

import logging

from torch import Tensor

from shardwright.torch.run.context import Context

__all__ = ["SameSamples"]

log = logging.getLogger(__name__)

_STEPS = 2


class SameSamples:
    """Looks at the losses of the first training steps.

    Args:
        context: the run.
    """

    def __init__(self, context: Context):
        self._context = context
        self._left = _STEPS if context.mesh.data > 1 else 0

    def look(self, losses: Tensor) -> None:
        """Takes the losses of one step; warns at the last of the first steps, on rank 0.

        Args:
            losses: of all ranks: (ranks); 0 where a rank computes none.
        """
        if not self._left:
            return
        groups = self._context.mesh.groups("dp")
        equal = all(bool((losses[list(ranks)] == losses[ranks[0]]).all()) for ranks in groups)
        alike = equal and bool(losses.any())
        self._left = self._left - 1 if alike else 0
        if not self._left and alike and self._context.rank == 0:
            log.warning(
                "all %d replicas had the same losses in the first %d steps: they seem to train on the same "
                "samples, so that one replica would do. Give each its own part of the data: "
                "sw.data_loader(dataset, ...), or sw.distributed_sampler(dataset) in a DataLoader.",
                self._context.mesh.data,
                _STEPS,
            )
