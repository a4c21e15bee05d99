"""`nn.SyncBatchNorm` over stages and replicas: statistics of all replicas, on any device.

PyTorch's own layer takes all ranks for replicas. Here only the ranks of one stage run the layer, and not
together during a trace or while units are timed. So it is a plain batch norm except in steps::

    trace, timing, one replica     plain
    step, 2 replicas               x, then (x - mean)^2, summed over the replicas, and so are their gradients
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardwright.comm.collectives.backend import normalised_over_ranks
from shardwright.errors import UsageError
from shardwright.run.context import Context
from shardwright.torch._private.modules import PlainBatchNorm
from shardwright.torch._private.tensors import function_mode_depth
from shardwright.torch.pytorch.modules import all_modules


class SynchronisedNorms:
    """The synchronised batch norms of a model."""

    def __init__(self, context: Context, model: nn.Module):
        self._context = context
        self._norms = [module for module in all_modules(model) if isinstance(module, nn.SyncBatchNorm)]
        self._given: dict[int, Any] = {}
        self._group: dist.ProcessGroup | None = None
        self._synchronises = False

    def in_force(self) -> AbstractContextManager[None]:
        """For a whole batch, what is traced and measured included; collective over all ranks at first."""
        return self._in_force() if self._norms else nullcontext()

    @contextmanager
    def _in_force(self) -> Iterator[None]:
        if self._group is None and self._context.mesh.data > 1:
            # Not the group of gradients: their sums are under way in a backward, in whatever order.
            self._group = self._context.further_group("rdp", use="statistics of batch norms")
        self._refuse_other_stages()
        kind: Any = nn.SyncBatchNorm
        original = kind.forward
        kind.forward = lambda norm, input: self._forward(norm, input)
        # A trace may copy modules, and groups cannot be copied.
        self._given = {id(norm): norm.process_group for norm in self._norms}
        for norm in self._norms:
            norm.process_group = None
        try:
            yield
        finally:
            kind.forward = original
            for norm in self._norms:
                norm.process_group = self._given[id(norm)]

    def synchronised(self) -> AbstractContextManager[None]:
        """While microbatches are computed, on all replicas in one order."""
        return self._synchronised() if self._norms else nullcontext()

    @contextmanager
    def _synchronised(self) -> Iterator[None]:
        self._synchronises = self._group is not None
        try:
            yield
        finally:
            self._synchronises = False

    def _forward(self, norm: nn.SyncBatchNorm, x: Tensor) -> Tensor:
        is_spread = self._context.mesh.spreads_model  # else nothing is between units
        if norm.training and self._group is not None and is_spread and function_mode_depth():
            raise UsageError(
                "a SyncBatchNorm without parameters (affine=False) is called between the units of the model, "
                "where replicas cannot sum its statistics. Let it have parameters."
            )
        if not (norm.training and self._synchronises):
            plain: Tensor = PlainBatchNorm.forward(norm, x)
            return plain
        assert self._group is not None
        return normalised_over_ranks(norm, x, self._group_of(norm, self._group))

    def _group_of(self, norm: nn.SyncBatchNorm, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The replicas, or those of them that the script has named."""
        given = self._given.get(id(norm))
        return group if given is None or given is dist.group.WORLD else given

    def _refuse_other_stages(self) -> None:
        """Refuses groups with ranks that do not run the layer: on all ranks, before any waits for another."""
        replicas = set(self._context.holders)
        for given in {id(norm.process_group): norm.process_group for norm in self._norms}.values():
            if given is None or given is dist.group.WORLD or self._context.mesh.world_size == 1:
                continue
            ranks = dist.get_process_group_ranks(given)
            if not replicas.issuperset(ranks):
                raise UsageError(
                    f"a SyncBatchNorm has a process_group of ranks {sorted(ranks)}, but of these only "
                    f"{sorted(replicas.intersection(ranks))} hold the same stage. Leave it out, or give it "
                    "sw.get_dp_process_group()."
                )
