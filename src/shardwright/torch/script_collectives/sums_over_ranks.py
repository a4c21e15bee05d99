"""A script's sums over all ranks between steps, which count each replica several times.

::

    2 replicas of 2 pipeline ranks, each with 32 samples

    rank                        0    1    2    3
    correct of 32              30   30   29   29      what a step returns is on every rank of the replica
    all_reduce over all ranks  118  118  118  118     59 samples, each counted twice

The metrics of torchmetrics sum over all ranks themselves; here they sum over replicas. For calls of a script,
a message appears once, if the ranks of each pipeline have passed the same value. Sums of what each rank has
of the model (norms) differ, and are right.
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.after_import import after_import
from shardwright.comm.identity.purpose import Purpose
from shardwright.torch.interception.glue import active_handler, batch_is_running
from shardwright.torch.pytorch.source_line import user_line
from shardwright.torch.run.context import Context, context, is_initialized
from shardwright.torch.run.ranks import get_dp_process_group

__all__ = ["metrics_over_replicas", "sums_pointed_out"]

log = logging.getLogger(__name__)

_METRICS = "torchmetrics.metric"
# Code of others that sums nothing of what it collects: Trainer takes means of losses, Accelerate pads to the
# largest size. (What scripts gather by an Accelerator is collected over replicas.)
_SUMS_NOTHING = frozenset({"transformers.trainer_pt_utils", "accelerate.utils.operations"})
# All ranks make the same calls over all ranks, so that all look at the same ones.
_LOOKED_AT = 10
# Functions that sum or collect, and where the tensor of this rank is among their arguments.
_FUNCTIONS = {
    "all_reduce": (0, "tensor"),
    "reduce": (0, "tensor"),
    "gather": (0, "tensor"),
    "all_gather": (1, "tensor"),
    "all_gather_into_tensor": (1, "input_tensor"),
}


@functools.cache
def metrics_over_replicas() -> None:
    """Has metrics of torchmetrics, whenever imported, count each replica once in runs with pipelines."""
    after_import(_METRICS, lambda module: _count_replicas(module.Metric))


def _count_replicas(metric: Any) -> None:
    original = metric.sync

    @functools.wraps(original)
    def sync(self: Any, dist_sync_fn: Any = None, process_group: Any = None, **kwargs: Any) -> Any:
        if process_group is None and getattr(self, "process_group", None) is None and _has_pipelines():
            process_group = get_dp_process_group()
        return original(self, dist_sync_fn, process_group, **kwargs)

    metric.sync = sync


def _has_pipelines() -> bool:
    return is_initialized() and context().mesh.spreads_model


@contextmanager
def sums_pointed_out(run: Context) -> Iterator[None]:
    """Says, once, that a script counts samples several times, in a run with pipelines."""
    originals = {name: getattr(dist, name) for name in _FUNCTIONS}
    watch = _Watch(run)
    for name, original in originals.items():
        setattr(dist, name, watch.watched(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


class _Watch:
    """Looks at the first calls over all ranks between steps."""

    def __init__(self, run: Context):
        self._run = run
        self._left = _LOOKED_AT

    def watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, followed by a look at what the ranks of this replica have given."""
        position, key = _FUNCTIONS[name]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__")
            if not self._left or caller in _SUMS_NOTHING or not self._is_meant(args, kwargs):
                return function(*args, **kwargs)
            given = args[position] if position < len(args) else kwargs.get(key)
            own = _digest(given, self._run.device)
            result = function(*args, **kwargs)
            self._left -= 1
            assert self._run.links.replica is not None
            rows = self._run.links.replica.gather(own, Purpose.AGREEMENT)
            if bool((rows == rows[0]).all()) and bool(rows.any()):
                self._left = 0
                self._say(name)
            return result

        return call

    def _is_meant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it is a sum over all ranks, between steps."""
        model = self._run.model
        if active_handler() is not None or batch_is_running() or model is None or not model.partitioned:
            return False
        given = (*args, *kwargs.values())
        groups = [item for item in given if isinstance(item, dist.ProcessGroup)]
        operations = [item for item in given if isinstance(item, dist.ReduceOp | dist.ReduceOp.RedOpType)]
        sums = all(operation == dist.ReduceOp.SUM for operation in operations)
        return sums and all(group is dist.group.WORLD for group in groups)

    def _say(self, name: str) -> None:
        mesh = self._run.mesh
        if self._run.rank == 0:
            log.warning(
                "%s: dist.%s goes over all %d ranks, and the %d ranks of each replica have given the same: "
                "a sum counts each sample %d times (a mean over all ranks is right). Count each replica "
                "once: dist.%s(..., group=sw.get_dp_process_group()).",
                user_line(),
                name,
                mesh.world_size,
                mesh.group_size("mp"),
                mesh.group_size("mp"),
                name,
            )


def _digest(given: Any, device: torch.device) -> Tensor:
    """A few numbers that are equal for equal tensors."""
    if not isinstance(given, Tensor) or given.is_complex() or not given.numel():
        return torch.zeros(2, dtype=torch.float64, device=device)
    flat = given.detach().to_dense().reshape(-1).to(device, torch.float64)
    place = torch.linspace(1.0, 2.0, flat.numel(), dtype=torch.float64, device=device)
    return torch.nan_to_num(torch.stack([flat.sum(), flat @ place]))
