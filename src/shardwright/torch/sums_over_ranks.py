"""A script's sums over all ranks between steps, which count each replica several times.

::

    2 replicas of 2 pipeline ranks, each with 32 samples

    rank                        0    1    2    3
    correct of 32              30   30   29   29      what a step returns is on every rank of the replica
    all_reduce over all ranks  118  118  118  118     59 samples, each counted twice

The metrics of torchmetrics sum over all ranks themselves; here they sum over replicas. A script's own sums go
over ``sw.get_dp_process_group()``.
"""

import functools
from typing import Any

from shardwright.after_import import after_import
from shardwright.run.context import context, is_initialized
from shardwright.run.ranks import get_dp_process_group

_METRICS = "torchmetrics.metric"


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
