"""Counts the cost of a traced call: FLOPs, bytes saved for backward, random draws, parameters touched."""

import functools
import hashlib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardwright.model_graph import Work
from shardwright.torch._private.tensors import (
    FakeTensor,
    HigherOrderOperator,
    device_asked,
    fake_mode_is_active,
    storage_key,
)
from shardwright.torch.counting.operation_work import (
    TracedDraws,
    attention_flops,
    flops_of,
    work_of,
)
from shardwright.torch.interception.deferred import spec_of
from shardwright.torch.pytorch.functions import (
    is_batch_norm_in_training,
    tensors_in,
    written_tensors,
)
from shardwright.torch.pytorch.modules import called_from, outermost_checkpoint
from shardwright.torch.randomness import Draw, describe_draw
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor

aten = torch.ops.aten


class Counts(NamedTuple):
    """Counts of a stretch of operations."""

    flops: int = 0
    draws: int = 0
    reads: int = 0

    def __add__(self, other: "Counts") -> "Counts":  # type: ignore[override]
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(a - b for a, b in zip(self, other, strict=True)))


class Watch(Protocol):
    """Sees every operation of a call."""

    def ran(self, arguments: Sequence[Any], result: Any, *, draws: bool) -> None:
        """An operation has run, and may have drawn random numbers."""

    def rehearsed(self, arguments: Sequence[Any], result: Any) -> None:
        """An operation has run in a call that the step function does not make."""

    def wrote(self, tensor: Tensor) -> None:
        """An operation has written to this tensor."""


class CostCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is active; enter it inside the fake mode, so that it sees operations first.

    Attributes:
        saved_bytes: bytes of distinct storages that autograd keeps, parameters not counted.
        draws: operations that took random numbers in the row of a plain loop, in order.
        written: memory of parameters, buffers and other tensors that was written to (`storage_key`).
        views: memory of a fake tensor -> that of the real tensor of which it is a view.
        written_again: which of that memory ``torch.utils.checkpoint`` writes to again, in the backward.
        normalises: a batch norm, of a module or not, has computed statistics.
        reads_data: an operation looked at values, or took the shape of its result from them.
    """

    # Else PyTorch refuses operators that are given functions (flex attention) where a mode is active.
    supports_higher_order_operators = True

    _so_far = Counts()
    _active: "list[CostCounter]" = []  # noqa: RUF012  (one stack for all counters)

    @staticmethod
    def active() -> "CostCounter | None":
        return CostCounter._active[-1] if CostCounter._active else None

    @staticmethod
    def so_far() -> Counts:
        """The sums of all counters so far: differences tell what happened in between."""
        return CostCounter._so_far

    def __init__(
        self,
        names: Mapping[int, str] | None = None,
        watch: Watch | None = None,
        row: TracedDraws | None = None,
    ):
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.work = Work()
        self.draws: list[Draw] = []
        self.random = False
        self.parameters: set[str] = set()
        self.written: set[int] = set()
        self.views: dict[int, int] = {}
        self.written_again: set[int] = set()
        self.reads_data = False
        self.normalises = False
        self._names = names or {}
        self._watch = watch
        self._row = row
        self._saved: dict[int, int] = {}
        # By the call of torch.utils.checkpoint, which repeats nothing until an operation needs gradients.
        self._undecided: dict[FrameType | None, set[int]] = {}
        self._stand_ins: dict[int, tuple[Tensor, Tensor | None]] = {}  # memory of a view -> the real tensor
        self._whole: dict[int, tuple[DividedTensor, Tensor]] = {}  # id -> the tensor, what stands for it
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def ignore(self, storages: Collection[int]) -> None:
        """Takes back what was counted as saved for these storages: it is somebody else's memory."""
        for key in storages:
            self._saved.pop(key, None)

    def saves(self, storage: int) -> bool:
        return storage in self._saved

    @property
    def saved_bytes(self) -> int:
        return sum(self._saved.values())

    def __enter__(self) -> "CostCounter":
        self._hooks.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        CostCounter._active.append(self)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        CostCounter._active.pop()
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        self._hooks.__exit__()
        # The history of what was computed holds this object, and must not hold all others by it.
        self._watch = None
        self._undecided.clear()
        self._stand_ins.clear()
        self._whole.clear()

    @contextmanager
    def keeping_only(self, inputs: list[Tensor]) -> Iterator[None]:
        """Counts these tensors as kept, and nothing of what is computed inside: that is recomputed."""
        for tensor in inputs:
            self._pack(tensor)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := device_asked(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        if self._names:
            self.parameters.update(self._names[id(t)] for t in tensors_in(args) if id(t) in self._names)
            self._note_written(func, args, kwargs)
            if self._undecided and torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args)):
                self.written_again |= self._undecided.pop(outermost_checkpoint(), set())
        draw = describe_draw(func, args, kwargs)
        in_row = draw is not None and (self._row is None or self._row.has(draw))
        result = func(*self._undivided(args), **self._undivided(kwargs))
        if self._names and getattr(func, "is_view", False):
            self._note_stand_in(args, result)
        reads = _reads_data(func, args)
        self.reads_data = self.reads_data or reads
        self.normalises = self.normalises or is_batch_norm_in_training(func, args)
        if self._watch is not None:
            self._watch.ran((*args, *kwargs.values()), result, draws=draw is not None)
        if draw is not None:
            self._note_draw(draw, in_row=in_row)
        flops = flops_of(func, args, kwargs, result)
        self.flops += flops
        self.work += work_of(func, args, kwargs, result, flops)
        if flops or reads or draw is not None:
            CostCounter._so_far += Counts(flops, int(draw is not None), int(reads))
        return result

    def _undivided(self, arguments: Any) -> Any:
        """Arguments with tensors without data in the place of those that ranks share: these have data."""
        if not fake_mode_is_active():
            return arguments
        items = list(arguments.values()) if isinstance(arguments, dict) else arguments
        if not any(each.__class__ is DividedTensor for each in tensors_in(items)):
            return arguments
        return tree_map_only(DividedTensor, self._without_data, arguments)

    def _without_data(self, tensor: DividedTensor) -> Tensor:
        found = self._whole.get(id(tensor))
        if found is None or found[0] is not tensor:
            whole = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
            found = self._whole[id(tensor)] = tensor, whole
        return found[1]

    def _higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Counts an operator that is given functions by what it is given and gives."""
        result = func(*args, **kwargs)
        self.parameters.update(self._names[id(t)] for t in tensors_in(args) if id(t) in self._names)
        if self._watch is not None:
            self._watch.ran((*args, *kwargs.values()), result, draws=False)
        if func.name() == "flex_attention":
            flops = attention_flops(*args, out_val=result)
            self.flops += flops
            self.work += Work(kernels=1, attention_flops=flops)
            CostCounter._so_far += Counts(flops)
        return result

    def _note_draw(self, draw: Draw, *, in_row: bool) -> None:
        self.random = True
        if in_row:
            self.draws.append(draw)
            if self._row is not None:
                self._row.drawn(draw)
        elif self._row is not None:
            self._row.drawn_elsewhere(draw)

    def _note_written(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        written = []
        for tensor in _written(func, args, kwargs):
            own, _ = self._stand_ins.get(storage_key(tensor), (tensor, None))
            written.append(storage_key(own))
            if self._watch is not None:
                self._watch.wrote(own)
        if written:
            self.written.update(written)
            # The variant that is `use_reentrant` runs without gradients at first.
            if called_from("torch.utils.checkpoint", "forward"):
                self.written_again.update(written)
            elif (frame := outermost_checkpoint()) is not None:
                self._undecided.setdefault(frame, set()).update(written)

    def _note_stand_in(self, args: Any, result: Any) -> None:
        """A view of a real tensor is a fake one, with memory of its own."""
        for own in tensors_in(args):
            if not isinstance(own, FakeTensor):
                for fake in tensors_in((result,)):
                    if isinstance(fake, FakeTensor):
                        self._stand_ins[storage_key(fake)] = own, fake
                        self.views[storage_key(fake)] = storage_key(own)

    def _pack(self, tensor: Tensor) -> Tensor:
        base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        if not isinstance(base, nn.Parameter) and id(base) not in self._names:
            self._saved[storage_key(tensor)] = _num_bytes(tensor)
        return tensor


def _num_bytes(tensor: Tensor) -> int:
    """The bytes in the memory of a tensor, which may be more than the tensor's."""
    if tensor.layout is torch.strided:
        return tensor.untyped_storage().nbytes()
    if tensor.layout is torch.sparse_coo:
        return tensor._values().nbytes + tensor._indices().nbytes
    return tensor.values().nbytes  # of the other sparse ones; their indices are mostly fewer


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes to."""
    if func in _WRITE_STATISTICS and args[5]:
        return tensors_in(args[3:5])
    return written_tensors(func, args, kwargs)


# Batch norms that write to arguments 3 and 4 in training, which is argument 5: their schemas do not say so.
_WRITE_STATISTICS = frozenset(
    (aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default)
)


def _reads_data(func: Any, args: Any) -> bool:
    if func is aten.index.Tensor:  # a mask selects as many entries as it has; numbers do not
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return not _READING_TAGS.isdisjoint(func.tags)


_BOUNDS = (int, type(None))

_READING_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


def class_key(module: nn.Module) -> str:
    """A hash that is equal for modules that do the same work."""
    rows: list[Any] = []
    for name, sub in module.named_modules():
        own = [
            (n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in sub.named_parameters(recurse=False)
        ]
        buffers = [(n, tuple(b.shape), str(b.dtype)) for n, b in sub.named_buffers(recurse=False)]
        plain = sorted(
            (k, v) for k, v in vars(sub).items() if type(v) in (bool, int, float, str) and k not in _POSITION
        )
        kind: Any = type(sub)
        compiled = vars(sub).get("_compiled_call_impl") is not None
        rows.append((name, _code_of(kind), plain, own, buffers, *(["compiled"] if compiled else [])))
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:12]


# Attributes that tell which of several equal blocks a module is, not what it does.
_POSITION = frozenset(
    {"layer_idx", "layer_id", "layer_index", "block_idx", "_is_full_backward_hook", "_shardwright_partition"}
)


@functools.cache
def _code_of(cls: type) -> str:
    """Name and methods of a class. Its source would tell, too, after a parse of the whole file."""
    methods = {name: value for name, value in vars(cls).items() if callable(value)}
    codes = [(name, getattr(inspect.unwrap(methods[name]), "__code__", None)) for name in sorted(methods)]
    rows = [(name, _rows_of(code)) for name, code in codes if code is not None]
    return f"{cls.__module__}.{cls.__qualname__} {hashlib.sha256(repr(rows).encode()).hexdigest()[:8]}"


def _rows_of(code: CodeType) -> list[Any]:
    """What a function does, by its bytecode: the same in all interpreters of one version."""
    constants = [_rows_of(each) if isinstance(each, CodeType) else _in_order(each) for each in code.co_consts]
    return [code.co_code, code.co_names, code.co_freevars, constants]


def _in_order(constant: object) -> str:
    """A constant as text; a set's order depends on the hash seed."""
    return repr(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)


def cost_class(func: Any, kind: str, fakes: list[Any]) -> str:
    """Key of calls that cost the same: same work, same shapes of inputs."""
    inputs = [_describe(item) for item in fakes]
    digest = hashlib.sha256(repr((kind, inputs)).encode()).hexdigest()[:12]
    name = type(func).__name__ if isinstance(func, nn.Module) else kind.split()[0]
    return f"{name}-{digest}"


def _describe(item: Any) -> str:
    if isinstance(item, Tensor):
        # A norm keeps nothing of what is behind frozen layers alone.
        without = item.is_floating_point() and not item.requires_grad
        return f"{spec_of(item)} without gradient" if without else str(spec_of(item))
    if item is None or isinstance(item, bool | int | float | str | torch.dtype):
        return repr(item)
    if isinstance(item, slice) and all(type(each) in _BOUNDS for each in (item.start, item.stop, item.step)):
        return repr(item)
    return type(item).__qualname__
