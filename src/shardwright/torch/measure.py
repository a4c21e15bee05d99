"""Times units and glue operations on the present device.

Calls of one cost class are timed once, on random data of the right shapes, with copies of the modules, so
that neither weights nor running statistics change. All ranks of a host measure at the same time, as many as
it has cores, because that is how they will run: sharing memory bandwidth and caches.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.model_graph import ModelGraph, Node
from shardwright.profile import UnitCost
from shardwright.torch.recording import Sample
from shardwright.torch.samples import copy_of_module, random_like
from shardwright.torch.split_backward import put_off_weights, split_modules
from shardwright.torch.tree import leaves

__all__ = ["Timing", "measure_class", "unit_cost"]

_BUDGET_S = 0.15
_MIN_RUNS, _MAX_RUNS = 3, 15
# Between two calls of a unit, its rank runs others: their weights take its place in the caches.
_OTHERS_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Timing:
    """Median seconds of one call.

    Attributes:
        forward_s: forward with autograd recording.
        backward_s: whole backward.
        weight_s: the part of it that can be put off.
        spread: interquartile range of forward + backward, relative to its median.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    spread: float


def measure_class(sample: Sample, *, device: torch.device, train: bool = True) -> Timing:
    """Times one cost class.

    Args:
        sample: what to run.
        device: where.
        train: time the backward as well.

    Raises:
        Exception: whatever the call raises on random data; the caller estimates instead.
    """
    func, split = sample.func, False
    if isinstance(func, nn.Module):
        func = copy_of_module(func, device)
        split = bool(split_modules(func))
    forwards, backwards, weights = [], [], []
    others = torch.zeros(_OTHERS_BYTES if device.type == "cpu" else 0, dtype=torch.uint8)
    started = time.perf_counter()
    for run in range(_MAX_RUNS + 1):
        others.add_(1)
        forward_s, input_s, weight_s = _run_once(func, sample, device=device, train=train, split=split)
        if run == 0:
            started = time.perf_counter()  # the first run warms up
            continue
        forwards.append(forward_s)
        backwards.append(input_s + weight_s)
        weights.append(weight_s)
        if run >= _MIN_RUNS and time.perf_counter() - started > _BUDGET_S:
            break
    totals = sorted(f + b for f, b in zip(forwards, backwards, strict=True))
    middle = statistics.median(totals)
    quartiles = statistics.quantiles(totals, n=4) if len(totals) > 1 else [middle] * 3
    return Timing(
        forward_s=statistics.median(forwards),
        backward_s=statistics.median(backwards),
        weight_s=statistics.median(weights),
        spread=(quartiles[2] - quartiles[0]) / middle if middle else 0.0,
    )


def unit_cost(node: Node, graph: ModelGraph, timing: Timing) -> UnitCost:
    """The cost of a call, with measured seconds."""
    return UnitCost(
        forward_s=timing.forward_s,
        backward_s=timing.backward_s,
        weight_s=timing.weight_s,
        saved_bytes=node.saved_bytes,
        work_bytes=node.work_bytes,
        weight_bytes=node.weight_bytes,
        split_work_bytes=node.split_work_bytes,
        input_bytes=sum(graph.values[value].spec.num_bytes for value in node.inputs),
        flops=node.flops,
        provenance="measured",
        spread=timing.spread,
    )


def _run_once(
    func: Callable[..., Any], sample: Sample, *, device: torch.device, train: bool, split: bool
) -> tuple[float, float, float]:
    args, kwargs = sample.structure.rebuild([random_like(leaf, device) for leaf in sample.leaves])
    start = _now(device)
    output = func(*args, **kwargs)
    forward_s = _now(device) - start
    roots = [t for t in _tensors(output) if t.requires_grad]
    if not train or not roots:
        return forward_s, 0.0, 0.0
    gradients = [torch.ones_like(root) for root in roots]
    start = _now(device)
    if not split:
        torch.autograd.backward(roots, gradients)
        return forward_s, _now(device) - start, 0.0
    with put_off_weights(root.grad_fn for root in roots) as work:
        torch.autograd.backward(roots, gradients)
    middle = _now(device)
    for item in work:
        item()
    return forward_s, middle - start, _now(device) - middle


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]
