"""Counts the temporary memory of a unit on tensors without data.

A unit is run forward and backward on fake tensors, while the storages that come alive are counted until they
are freed. Fake tensors are freed when real ones would be, so the count follows every temporary::

    bytes      forward            backward
      ▲          ▄▄                 ▄▄▄▄
      │        ▄████▄             ▄██████▄           ─ work_bytes above kept, the larger of both peaks
      │      ▄████████▄▄▄▄▄▄▄▄▄▄▄▄█████████▄         ─ kept: what autograd saves
      └──────────────────────────────────────▶

What the kernel of an operation takes and gives back inside one call is not seen.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.torch._private.modules import put_saved_tensor_hooks, take_saved_tensor_hooks
from shardwright.torch._private.tensors import device_asked, storage_key
from shardwright.torch.backward.split_backward import put_off_weights, split_modules, unsplit
from shardwright.torch.counting.compiled_modules import HookEffects
from shardwright.torch.counting.cost_counter import Watch
from shardwright.torch.interception.glue import plain_torch
from shardwright.torch.python_state.snapshot import snapshot_of
from shardwright.torch.pytorch.tensors import copy_of_object
from shardwright.torch.pytorch.tree import Structure, leaves
from shardwright.torch.tracing.traced_values import with_history

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """Bytes of one call beside those that it keeps for its backward.

    Attributes:
        work_bytes: most bytes above what is kept, in the forward or the backward.
        weight_bytes: bytes that a backward without the gradients of weights leaves for these, 0 where it
            cannot be split; None: not known.
        split_work_bytes: `work_bytes` with such a backward, which frees less on its way; None: not known.
    """

    work_bytes: int = 0
    weight_bytes: int | None = None
    split_work_bytes: int | None = None


def working_memory(
    func: Callable[..., Any],
    fakes: Sequence[Any],
    structure: Structure,
    *,
    given: Sequence[bool],
    hooks: HookEffects,
    watch: Watch | None = None,
) -> WorkingMemory:
    """Counts for one call, without a trace of it, under the fake mode of its arguments."""
    if not torch.is_grad_enabled():
        return WorkingMemory()
    # Those of a recomputation around this call would run all that is recomputed, at the first backward.
    saved_tensor_hooks = take_saved_tensor_hooks()
    split = split_modules(func) if isinstance(func, nn.Module) else []
    attributes = [snapshot_of(func)] if isinstance(func, nn.Module) else []
    is_split = isinstance(func, nn.Module) and any("forward" in vars(sub) for sub in func.modules())
    trained = [p for p in _parameters(func, fakes) if p.requires_grad]
    before = [p.grad for p in trained]

    def count(*, split: bool) -> tuple[int, int]:
        try:
            return _count(func, fakes, structure, given, watch, split=split)
        finally:
            for before_call in attributes:
                before_call.put_back()

    try:
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)  # gradients are there, and are added to
        work_bytes, _ = hooks.unseen(func, lambda: count(split=False))
        split_work_bytes, weight_bytes = work_bytes, 0
        if is_split:
            split_work_bytes, weight_bytes = hooks.unseen(func, lambda: count(split=True))
    except Exception as error:
        log.debug("the work memory of %s is not known: %s", type(func).__name__, error)
        return WorkingMemory()
    finally:
        unsplit(split)
        for parameter, gradient in zip(trained, before, strict=True):
            parameter.grad = gradient
        put_saved_tensor_hooks(saved_tensor_hooks)
    return WorkingMemory(work_bytes, weight_bytes, split_work_bytes)


def _count(
    func: Callable[..., Any],
    fakes: Sequence[Any],
    structure: Structure,
    given: Sequence[bool],
    watch: Watch | None,
    *,
    split: bool,
) -> tuple[int, int]:
    """Largest number of bytes above what is kept, and bytes that are left after the backward."""
    with _LiveBytes(watch) as live:
        args, kwargs = structure.rebuild(
            [_given(fake) if own else _fresh(fake) for fake, own in zip(fakes, given, strict=True)]
        )
        output = func(*args, **kwargs)
        del args, kwargs
        roots = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not roots:
            return 0, 0
        edges = [torch.autograd.graph.get_gradient_edge(root) for root in roots]
        shapes = [(root.shape, root.dtype, root.device) for root in roots]
        del output, roots
        kept = live.now
        gradients = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in shapes]
        if not split:
            _backward(edges, gradients)
            return live.peak - kept, live.now
        with put_off_weights(edge.node for edge in edges) as work:
            _backward(edges, gradients)
        gradients.clear()
        left = live.now if work else 0  # a convolution under autocast has nothing put off
        work.clear()
        return live.peak - kept, left


def _backward(edges: list[Any], gradients: list[Tensor]) -> None:
    with plain_torch():  # it is not the one of the step function
        torch.autograd.backward(edges, gradients)


def _given(item: Any) -> Any:
    """The same memory without its history, of which the backward would free what the trace still needs."""
    if not isinstance(item, Tensor) or item.grad_fn is None:
        return item
    return with_history(item.data, nullcontext())  # `detach()` would share how often it has changed


def _fresh(item: Any) -> Any:
    """A tensor like this one, which is freed as soon as nobody needs it: autograd keeps no leaf alive.

    Of an object that the call may change (a cache of keys and values), a copy.
    """
    if not isinstance(item, Tensor):
        return copy_of_object(item)
    if not item.requires_grad:
        return torch.empty_like(item)
    seed = torch.empty((), dtype=item.dtype, device=item.device, requires_grad=True)
    return seed.expand(item.shape).contiguous() if item.dim() else seed.clone()


def _parameters(func: Callable[..., Any], fakes: Sequence[Any]) -> list[nn.Parameter]:
    own = list(func.parameters()) if isinstance(func, nn.Module) else []
    return own + [fake for fake in fakes if isinstance(fake, nn.Parameter)]


class _LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still alive."""

    def __init__(self, watch: Watch | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch
        self.now = self.peak = 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := device_asked(func, args)) is not None:
            return device
        known = {storage_key(t) for t in leaves((args, kwargs or {})) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        if self._watch is not None:
            self._watch.rehearsed((*args, *(kwargs or {}).values()), result)
        for tensor in leaves(result):
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
                continue  # sparse ones have no memory that could be asked
            if storage_key(tensor) not in known:
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._alive:
            return
        num_bytes = storage.nbytes()

        def gone(_: Any) -> None:
            self._alive.pop(key, None)
            self.now -= num_bytes

        self._alive[key] = weakref.ref(storage, gone)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
