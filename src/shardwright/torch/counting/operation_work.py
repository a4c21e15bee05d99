"""The work of a single operation: FLOPs, bytes moved, kernels; memory written again.

The repeated forward runs up to the last operation that saves something for gradients. So a write under a
checkpoint is repeated if such an operation makes it, or follows it under the same checkpoint. A forward
without gradients, such as a teacher's, repeats nothing.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardwright.model_graph import Work
from shardwright.torch.pytorch.source_line import called_from, outermost_checkpoint

aten = torch.ops.aten

_MOVE_NOTHING = frozenset({aten._unsafe_view, aten.alias, aten.empty, aten.empty_like, aten.lift_fresh})
"""Operations that launch no kernel, beside the views."""

_GATHERS = frozenset({aten.embedding, aten.index_select, aten.gather, aten.index})
"""Operations that read as much as they write, however large what they read from is."""


def tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, and in lists among them."""
    for argument in arguments:
        for item in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(item, Tensor):
                yield item


def flops_of(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> int:
    """The floating-point operations of an operation; a multiply-add counts as two."""
    count = _FLOPS.get(func.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def attention_flops(*args: Any, out_val: Any, **kwargs: Any) -> int:
    """Two batched matrix products: queries by keys, weights by values.

    FlopCounterMode has no entry for attention on CPU and counts nothing. A causal mask is counted in full,
    as the kernels for which torch has formulas do.
    """
    query_BHSD, key_BHTD, value_BHTE = args[:3]
    *batch, seq_q, dim = query_BHSD.shape
    pairs = math.prod(batch) * seq_q * key_BHTD.shape[-2]
    return int(2 * pairs * (dim + value_BHTE.shape[-1]))


def _attention_packets() -> list[Any]:
    names = (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    return [getattr(aten, name) for name in names if hasattr(aten, name)]


def work_of(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, flops: int) -> Work:
    """Counts what one operation computes and moves; nothing for views."""
    written = list(tensors_in((result,)))
    if getattr(func, "is_view", False) or func.overloadpacket in _MOVE_NOTHING or not written:
        return Work()
    if func.overloadpacket in _ATTENTION:
        # A causal mask hides half of what it is counted for.
        seen = flops / 2 if _argument(func, args, kwargs, "is_causal") else flops
        return Work(kernels=1, attention_flops=seen)
    read = written if func.overloadpacket in _GATHERS else tensors_in((*args, *kwargs.values()))
    num_bytes = sum(tensor.nbytes for tensor in (*read, *written) if tensor.layout is torch.strided)
    if flops:
        return Work(products=1, product_flops=flops, product_bytes=num_bytes / 2)
    return Work(kernels=1, moved_bytes=num_bytes)


def _argument(func: Any, args: Any, kwargs: Mapping[str, Any], name: str) -> Any:
    """The argument of an operation under a name of its schema; None if it is left out."""
    names = [argument.name for argument in func._schema.arguments]
    at = names.index(name) if name in names else len(args)
    return args[at] if at < len(args) else kwargs.get(name)


_ATTENTION = frozenset(_attention_packets())

_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    **dict.fromkeys(_ATTENTION, attention_flops),
}


class RepeatedWrites:
    """Looks at the operations of one call of a unit.

    Attributes:
        again: memory (`storage_key`) that is written to a second time.
        once: memory that is written to without being repeated, or several times in between.
        undecided: when the call is over: memory that is written to a second time if another call under the
            same checkpoint has gradients.
    """

    def __init__(self) -> None:
        self.again: set[int] = set()
        self.once: set[int] = set()
        self.undecided: set[int] = set()
        self._undecided: list[tuple[FrameType, int]] = []

    def wrote(self, memories: Iterable[int]) -> None:
        """An operation is about to write to memory."""
        frame = outermost_checkpoint()
        # The variant that is `use_reentrant` runs without gradients at first.
        reentrant = called_from("torch.utils.checkpoint", "forward")
        for memory in memories:
            if reentrant:
                self._repeat(memory)
            elif frame is not None:
                self._undecided.append((frame, memory))
            else:
                self.once.add(memory)

    def ran(self, tensors: Iterable[Tensor]) -> None:
        """An operation with these arguments runs."""
        if not self._undecided or not torch.is_grad_enabled():
            return
        if any(tensor.requires_grad for tensor in tensors):
            frame = outermost_checkpoint()
            repeated = [memory for other, memory in self._undecided if other is frame]
            self._undecided = [(other, memory) for other, memory in self._undecided if other is not frame]
            for memory in repeated:
                self._repeat(memory)

    def forget(self) -> None:
        """Ends the call and releases its frames."""
        self.undecided = {memory for _, memory in self._undecided}
        self._undecided = []

    def _repeat(self, memory: int) -> None:
        if memory in self.again:
            self.once.add(memory)
        self.again.add(memory)
