"""``import horovod.torch as hvd``, over Shardwright's collectives.

Beside ``smp.init({"horovod": True, ...})`` the ranks are the replicas, and the library averages their
gradients and starts them alike itself: `DistributedOptimizer` and `broadcast_parameters` leave it to that.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.errors import UsageError
from shardwright.run.context import is_initialized as _beside_a_run
from smdistributed.dataparallel.data_ranks import data_ranks as _data_ranks
from smdistributed.horovod import process as _process
from smdistributed.horovod.not_here import names_not_here as _names_not_here
from smdistributed.horovod.process import *  # noqa: F403
from smdistributed.horovod.process import allgather_object, rank
from smdistributed.horovod.torch_optimizer import averaging_optimizer as _averaging_optimizer

Average = "average"
Sum = "sum"
Min = "min"
Max = "max"

__all__ = [
    *_process.__all__,
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Sum",
    "allgather",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "broadcast",
    "broadcast_",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "poll",
    "synchronize",
]

__getattr__ = _names_not_here(__name__)

_OfTensor = Callable[[Tensor], Tensor]


class Compression:
    """How gradients travel: as they are, or in 16 bits."""

    none = "none"
    fp16 = "fp16"


class _Collective(torch.autograd.Function):
    """A collective, and the one that makes its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, collective: _OfTensor, gradient: _OfTensor) -> Tensor:
        ctx.gradient = gradient
        return collective(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient(gradient), None, None


def _differentiable(tensor: Tensor, collective: _OfTensor, gradient: _OfTensor) -> Tensor:
    if not tensor.requires_grad:
        return collective(tensor)
    found: Tensor = _Collective.apply(tensor, collective, gradient)  # type: ignore[no-untyped-call]
    return found


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: str = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """A tensor over all ranks, in memory of its own. Its gradient is reduced likewise.

    Args:
        average: True for the mean, False for the sum; None to go by `op`.
        name: changes nothing.
    """
    chosen = op if average is None else (Average if average else Sum)

    def reduced(each: Tensor) -> Tensor:
        return _reduced(each, chosen, compression, prescale_factor, postscale_factor)

    def gradient(each: Tensor) -> Tensor:
        if chosen in (Min, Max):
            raise UsageError(f"hvd.allreduce by {chosen!r} has no gradient. Give it tensor.detach().")
        return reduced(each)

    return _differentiable(tensor, reduced, gradient)


def _reduced(
    given: Tensor, chosen: str | None, compression: str, prescale_factor: float, postscale_factor: float
) -> Tensor:
    ranks, dtype = _data_ranks(), given.dtype
    if prescale_factor != 1.0:
        given = given * prescale_factor
    if compression == Compression.fp16 and given.is_floating_point():
        given = given.half()
    if chosen in (None, Average, Sum):
        (made,) = ranks.sums([given], divisor=1 if chosen == Sum else ranks.size)
    elif chosen in (Min, Max):
        made = ranks.extreme(given, largest=chosen == Max)
    else:
        raise UsageError(f"{chosen!r} is no reduction: use hvd.Average, hvd.Sum, hvd.Min or hvd.Max.")
    made = made.to(dtype)
    return made * postscale_factor if postscale_factor != 1.0 else made


def allreduce_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Makes a tensor that of all ranks, in place; arguments as for `allreduce`."""
    with torch.no_grad():
        return tensor.copy_(allreduce(tensor, *args, **kwargs))


def allreduce_async(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """As `allreduce`, for `synchronize`; it has ended when this returns, and has no gradient."""
    return allreduce(tensor.detach(), *args, **kwargs)


def allreduce_async_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """As `allreduce_`, for `synchronize`; it has ended when this returns."""
    return allreduce_(tensor, *args, **kwargs)


def synchronize(handle: Tensor) -> Tensor:
    """What an operation without waiting has made."""
    return handle


def poll(handle: Tensor) -> bool:
    """Whether such an operation has ended."""
    return True


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """The rows of all ranks, by rank, which may have different numbers of them.

    Its gradient is that of this rank's rows, summed over all ranks.
    """
    ranks, shape = _data_ranks(), tensor.shape
    return _differentiable(tensor, ranks.gathered, lambda each: ranks.own_rows(each, shape))


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """The tensor of one rank, on all, in memory of its own. That rank gets the sum of the gradients."""
    ranks = _data_ranks()
    return _differentiable(
        tensor,
        lambda each: ranks.broadcast([each], root_rank)[0],
        lambda each: ranks.sum_at(each, root_rank),
    )


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Makes a tensor that of one rank, in place."""
    with torch.no_grad():
        return tensor.copy_(broadcast(tensor, root_rank))


def broadcast_parameters(params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0) -> None:
    """Gives parameters, or a state, the values of one rank.

    Raises:
        UsageError: beside ``smp.init``, where replicas start with the first one's values, it is another.
    """
    if _beside_a_run():
        if root_rank != 0:
            raise UsageError(
                f"replicas start with the values of the first one, and root_rank is {root_rank}. Set it to 0."
            )
        return
    pairs = params.items() if isinstance(params, Mapping) else params
    tensors = [value for _, value in sorted(pairs, key=lambda pair: pair[0]) if isinstance(value, Tensor)]
    made = _data_ranks().broadcast([tensor.detach() for tensor in tensors], root_rank)
    with torch.no_grad():
        for tensor, value in zip(tensors, made, strict=True):
            tensor.copy_(value)


def broadcast_optimizer_state(optimizer: Any, root_rank: int = 0) -> None:
    """Gives an optimizer the state of one rank's; beside ``smp.init`` replicas have the same already."""
    if _beside_a_run():
        return
    state = allgather_object(optimizer.state_dict() if rank() == root_rank else None)[root_rank]
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    named_parameters: Any = None,
    compression: str = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    **options: Any,
) -> Any:
    """An optimizer whose ``step`` averages gradients over ranks; it has `synchronize`, `skip_synchronize`.

    Args:
        named_parameters: changes nothing, and so do `options`, which tune messages, and
            `backward_passes_per_step`: gradients are averaged when ``step`` is called.
    """
    if op not in (Average, Sum):
        raise UsageError(f"{op!r} is no reduction of gradients: use hvd.Average or hvd.Sum.")
    return _averaging_optimizer(
        optimizer, average=op == Average, in_half_precision=compression == Compression.fp16
    )
