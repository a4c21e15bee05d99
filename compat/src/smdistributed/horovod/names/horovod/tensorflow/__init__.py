"""``import horovod.tensorflow as hvd``, over Shardwright's collectives.

Beside ``smp.init({"horovod": True, ...})`` the ranks are the replicas: gradients and variables that other
ranks of the pipeline hold are None, or are left out.
"""

from collections.abc import Sequence
from typing import Any

from shardwright.errors import UsageError
from smdistributed.dataparallel.tensorflow import (
    BroadcastGlobalVariablesHook,
    Compression,
    broadcast_global_variables,
)
from smdistributed.dataparallel.tensorflow import collectives as _collectives
from smdistributed.dataparallel.tensorflow import gradients as _gradients
from smdistributed.dataparallel.tensorflow.collectives import Reduction as _Reduction
from smdistributed.horovod import process as _process
from smdistributed.horovod.not_here import names_not_here as _names_not_here
from smdistributed.horovod.process import *  # noqa: F403

Average = _Reduction.AVERAGE
Sum = _Reduction.SUM
Min = _Reduction.MIN
Max = _Reduction.MAX

__all__ = [
    *_process.__all__,
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Sum",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "grouped_allreduce",
]

__getattr__ = _names_not_here(__name__)


def _operation(average: bool | None, op: Any) -> _Reduction:
    if average is not None:
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, _Reduction):
        raise UsageError(f"{op!r} is no reduction: use hvd.Average, hvd.Sum, hvd.Min or hvd.Max.")
    return op


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> Any:
    """A tensor over all ranks; None for None.

    Args:
        average: True for the mean, False for the sum; None to go by `op`.
        device_dense: changes nothing, and so do `device_sparse` and `name`.
    """
    return grouped_allreduce(
        [tensor],
        average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Tensors over all ranks, in one collective; arguments as for `allreduce`."""
    scaled = [_scaled(tensor, prescale_factor) for tensor in tensors]
    made = _collectives.reduced_each(scaled, _operation(average, op), compression=compression)
    return [_scaled(tensor, postscale_factor) for tensor in made]


def _scaled(tensor: Any, factor: float) -> Any:
    return tensor if tensor is None or factor == 1.0 else tensor * factor


def allgather(tensor: Any, name: str | None = None) -> Any:
    """The rows of all ranks, by rank, which may have different numbers of them."""
    return _collectives.gathered(tensor)


def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """The tensor of one rank, on all."""
    return _collectives.broadcast([tensor], root_rank)[0]


def broadcast_variables(variables: Sequence[Any], root_rank: int, inplace: bool = False) -> None:
    """Gives variables the values of one rank; those of other ranks of the pipeline are left out."""
    _collectives.broadcast_variables(list(variables), root_rank)


def DistributedGradientTape(  # noqa: N802
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = None,
    **options: Any,
) -> Any:
    """A ``tf.GradientTape`` whose gradients are those of all ranks together.

    Args:
        device_dense: changes nothing, and so do `device_sparse` and `options`, which tune messages.
    """
    average = _gradients.over_ranks(
        _operation(None, op), compression=compression, sparse_as_dense=sparse_as_dense
    )
    return _gradients.distributed_tape(gradtape, average)


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = None,
    **options: Any,
) -> Any:
    """A Keras optimizer that averages gradients over all ranks before it applies them.

    Args:
        name: changes nothing, and so do `use_locking`, `device_dense`, `device_sparse` and `options`.

    Raises:
        UsageError: gradients of several backward passes are to be added up first.
    """
    if backward_passes_per_step != 1:
        raise UsageError(
            f"backward_passes_per_step is {backward_passes_per_step}, and only 1 is there. Add gradients up "
            "in the script, and apply them every so often."
        )
    average = _gradients.over_ranks(
        _operation(None, op), compression=compression, sparse_as_dense=sparse_as_dense
    )
    return _gradients.distributed_optimizer(optimizer, average)
