"""Clips by the norm of all gradients, over all stages.

`torch.nn.utils.clip_grad_norm_` uses the gradients of its own rank. Once a model is split into stages, the
norm that it takes here covers all of them.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.comm.message_names import Purpose
from shardwright.errors import UsageError
from shardwright.run.context import context, is_initialized
from shardwright.run.joint_calls import first_cause_named
from shardwright.torch._private.modules import parameters_to_clip, replace_total_norm
from shardwright.torch.interception.glue import refuse_inside_step
from shardwright.torch.model.distributed_model import wrapped_model
from shardwright.torch.parameters.sharded_tensor import own_part
from shardwright.torch.step_end.training_alike import OwnScaling
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, local_of

_REMEDY = "Clip between it and optimizer.step()."


def clip_grad_norm_(
    parameters: "nn.Module | Iterable[Tensor] | Tensor", max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scales gradients so that their norm over all stages is at most `max_norm`.

    Call it on every rank, with the model or with ``model.parameters()``. Parameters that several stages
    hold count once. `torch.nn.utils.clip_grad_norm_` does the same, once a model is spread over stages.

    Args:
        parameters: the model, or parameters; those of other ranks are passed over.
        max_norm: bound on the norm.
        norm_type: which p-norm; ``inf`` for the largest entry.

    Returns:
        The norm before scaling, a 0-dim float64 tensor, equal on all ranks.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    chosen = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    refuse_inside_step("gradients are clipped", _REMEDY)
    gradients = [parameter.grad for parameter in chosen if parameter.grad is not None]
    norm = _norm(gradients, norm_type, asked=chosen)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in map(own_part, gradients):
        gradient.mul_(factor.to(gradient.dtype))
    return norm


def gradient_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of gradients over all stages, which stay as they are; collective over the replica."""
    chosen = list(parameters)
    gradients = [parameter.grad for parameter in chosen if parameter.grad is not None]
    return _norm(gradients, norm_type, asked=chosen)


def norm_over_stages() -> None:
    """Has PyTorch's own functions take the norm over all stages, where the gradients are the model's."""
    replace_total_norm(_instead_of)


def _instead_of(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not _are_of_stages(gradients):
            return original(gradients, norm_type, error_if_nonfinite, foreach)
        refuse_inside_step("gradients are clipped", _REMEDY)
        norm = _norm(gradients, float(norm_type), asked=parameters_to_clip(sys._getframe(1)))
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients of all stages is {norm.item()}, so they "
                "cannot be clipped. Skip this step, or set error_if_nonfinite=False."
            )
        return norm

    return total_norm


def _are_of_stages(gradients: list[Tensor]) -> bool:
    """Whether they are of the model that is spread over stages; a rank may have none of those asked for."""
    if not is_initialized():
        return False
    current, model = context(), wrapped_model()
    if model is None or not model.partitioned:
        return False
    if current.groups.pipeline is None and model.replicas.sharding is None:
        return False
    own = {id(parameter.grad) for parameter in model.local_parameters()}
    return not gradients or any(id(gradient) in own for gradient in gradients)


@torch.no_grad()
def _norm(gradients: list[Tensor], norm_type: float, *, asked: Sequence[Tensor]) -> Tensor:
    """The norm over all stages; collective over the replica."""
    current, model = context(), wrapped_model()
    counted = gradients
    if model is not None and model.partitioned:
        elsewhere = {id(parameter.grad) for parameter in model.counted_elsewhere()}
        counted = [gradient for gradient in gradients if id(gradient) not in elsewhere]
    # The first of those with the same part counts it.
    counted = [gradient for gradient in counted if current.copy_of(_num_parts(gradient))[0] == 0]
    cut = [gradient for gradient in counted if own_part(gradient) is not gradient]
    others = [gradient for gradient in counted if own_part(gradient) is gradient]
    total = _power_sum([local_of(gradient) for gradient in others], norm_type, current.device)
    if current.groups.shard is not None:
        of_rows = _power_sum([own_part(gradient) for gradient in cut], norm_type, current.device)
        greatest = norm_type == float("inf")
        dist.all_reduce(
            of_rows, dist.ReduceOp.MAX if greatest else dist.ReduceOp.SUM, group=current.groups.shard
        )
        total = torch.maximum(total, of_rows) if greatest else total + of_rows
    if current.links.replica is not None:
        OwnScaling.clipped_together()
        with first_cause_named(current):
            alone = _name_of_one_alone(asked)
            number = torch.tensor(float(crc32(alone.encode())), dtype=total.dtype, device=total.device)
            of_stages, numbers = current.links.replica.gather(
                torch.stack([total, number]), Purpose.NORM
            ).unbind(1)
            if alone:
                _refuse_another(alone, numbers.tolist())
        total = of_stages.max() if norm_type == float("inf") else of_stages.sum()
    return total if norm_type == float("inf") else total ** (1.0 / norm_type)


def _num_parts(gradient: Tensor) -> int:
    """Ranks of those that share a batch that have different elements of it."""
    spec = gradient._spec if isinstance(gradient, DividedTensor) else getattr(gradient, "spec", None)
    return 1 if spec is None else int(spec.group.num_ranks)


def _name_of_one_alone(asked: Sequence[Tensor]) -> str:
    """The name of the one parameter asked for; empty where it is more, or all that there is on this rank.

    Lists such as the groups of an optimizer have other parameters on each rank: the norm is of all of them.
    """
    model = wrapped_model()
    if model is None or not model.partitioned or len(asked) != 1:
        return ""
    with_gradient = [p for p in model.local_parameters() if p.grad is not None]
    groups = [group["params"] for optimizer in context().optimizers for group in optimizer.param_groups]
    for whole in (with_gradient, *groups):
        if [id(parameter) for parameter in whole] == [id(asked[0])]:
            return ""
    return next((name for name, p in model.local_named_parameters() if p is asked[0]), "")


def _refuse_another(alone: str, numbers: Sequence[float]) -> None:
    """Refuses to clip one parameter while another rank clips another one, by the numbers of their names."""
    current = context()
    mine = numbers[current.replica_ranks.index(current.rank)]
    if any(number not in (0, mine) for number in numbers):
        raise UsageError(
            f"rank {current.rank} clips the gradient of {alone} alone, and another rank that of another "
            "parameter, so the norm would be of both. Clip all at once: clip_grad_norm_(model.parameters(), "
            "max_norm); or one after the other on all ranks, those of other ranks, too: "
            "for p in model.parameters(): clip_grad_norm_(p, max_norm)."
        )


def _power_sum(gradients: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Sum of the p-th powers of all entries, or the largest entry; float64: the order does not matter."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        norm = torch.linalg.vector_norm(gradient, norm_type).double()
        total = torch.maximum(total, norm) if norm_type == float("inf") else total + norm**norm_type
    return total
