"""Reduces elements of several ranks to one; collectives of stock groups, by their names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from shardwright.errors import UsageError

_Function = Callable[..., Tensor]

_FUNCTIONS: dict[str, _Function] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_SHORT = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction of elements, taken in the order in which they are given.

    Attributes:
        name: of the reduction, as `torch.distributed.ReduceOp` has it.
    """

    name: str

    @classmethod
    def of(cls, op: "dist.ReduceOp | dist.ReduceOp.RedOpType | str") -> "Reduction":
        """The reduction that torch.distributed means.

        >>> Reduction.of(dist.ReduceOp.AVG)
        Reduction(name='AVG')
        """
        kind = getattr(op, "op", op)
        name = str(getattr(kind, "name", kind)).upper()
        if name not in _FUNCTIONS:
            raise UsageError(
                f"the reduction {name} is none of those that Shardwright's collectives have: "
                f"{', '.join(_FUNCTIONS)}. Use one of these, or a process group of another backend."
            )
        return cls(name)

    def check(self, dtype: torch.dtype) -> None:
        """Refuses elements that cannot be reduced so, before any rank waits for another."""
        is_whole = not (dtype.is_floating_point or dtype.is_complex)
        fits = {
            "AVG": not is_whole,
            "MIN": not dtype.is_complex,
            "MAX": not dtype.is_complex,
            "BAND": is_whole,
            "BOR": is_whole,
            "BXOR": is_whole,
        }
        if not fits.get(self.name, True):
            raise UsageError(
                f"{self.name} cannot reduce elements of {dtype}. Use SUM, or tensors of another type."
            )
        if dtype.is_floating_point and dtype.itemsize == 1:
            raise UsageError(f"elements of {dtype} cannot be reduced. Cast them, for example to bfloat16.")

    def combine(self, sources: Sequence[Tensor], target: Tensor) -> None:
        """Reduces tensors of one shape and type, two at least; the target may be one of them.

        Sums and products of 16 bit are rounded once, at the end.
        """
        function = _FUNCTIONS[self.name]
        first, second, *rest = sources
        if not rest:
            function(first, second, out=target)
            return
        if target.dtype in _SHORT:
            total = function(first.float(), second.float())
        elif any(target.data_ptr() == source.data_ptr() for source in rest):
            total = function(first, second)
        else:
            total = function(first, second, out=target)
        for source in rest:
            function(total, source, out=total)
        if total is not target:
            target.copy_(total)

    def finish(self, result: Tensor, num_ranks: int) -> None:
        """Completes the result when all ranks are in it."""
        if self.name == "AVG":
            result.div_(num_ranks)


# Of these it knows how to reduce them.
_SUMMED = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)


def gloo_can(collective: str, dtype: torch.dtype, reduction: Reduction) -> bool:
    """Whether gloo has a collective for elements of a type; it copies any."""
    if collective in ("all_gather", "broadcast"):
        return True
    return dtype in _SUMMED and reduction.name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")


def start_gloo(
    group: dist.ProcessGroup, collective: str, data: Tensor, output: Tensor, reduction: Reduction, source: int
) -> dist.Work:
    """Begins a collective of gloo, which copies elements of any type as bytes."""
    if collective == "all_gather":
        data, output = data.view(torch.uint8), output.view(torch.uint8)
    elif collective == "broadcast" and output.dtype not in _SUMMED:
        output = output.view(torch.uint8)
    op: Any = dist.ReduceOp.SUM if reduction.name == "AVG" else getattr(dist.ReduceOp, reduction.name)
    work: Any = _start(group, collective, data, output, op, source, is_async=True)
    return work  # type: ignore[no-any-return]


def run_stock(
    group: dist.ProcessGroup,
    collective: str,
    data: Tensor,
    output: Tensor,
    op: Any = dist.ReduceOp.SUM,
    *,
    source: int = 0,
) -> None:
    """Runs a collective of gloo or NCCL as it is; on streams, the present one waits for it."""
    # NCCL gives nothing to wait for where the caller's stream does.
    if (work := _start(group, collective, data, output, op, source, is_async=False)) is not None:
        work.wait()


def _start(
    group: dist.ProcessGroup,
    collective: str,
    data: Tensor,
    output: Tensor,
    op: Any,
    source: int,
    *,
    is_async: bool,
) -> dist.Work | None:
    options: Any
    if collective == "all_gather":
        options = AllgatherOptions()
        options.asyncOp = is_async
        return group._allgather_base(output, data, options)
    if collective == "reduce_scatter":
        options = dist.ReduceScatterOptions()
        options.reduceOp, options.asyncOp = op, is_async
        return group._reduce_scatter_base(output, data, options)
    if collective == "all_reduce":
        options = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = op, is_async
        return group.allreduce([output], options)
    if collective == "broadcast":
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = source, is_async
        return group.broadcast([output], options)
    raise UsageError(f"there is no collective {collective!r}.")
