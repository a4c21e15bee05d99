"""The weight of a microbatch in the loss of its batch.

A loss belongs to a microbatch, and the batch wants the mean over all of it. Let microbatch i have n_i items
(samples, or labels that count) and the mean loss l_i over them::

    loss of the batch = sum over i of (n_i / n) * l_i

The gradients are those of this sum, so they are exact for microbatches of any sizes and for any number of
ignored labels.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.torch.pytorch.tree import flatten

__all__ = ["backward_of_share", "batch_size", "counted_labels", "shifts_labels"]


def batch_size(*tensors: Any) -> int:
    """The number of samples: the length of the first tensor that has dimensions, at any depth."""
    items: Iterable[Any] = flatten(tensors)[0]
    for item in items:
        if isinstance(item, Tensor) and item.dim():
            return int(item.shape[0])
    raise UsageError(
        "the batch has no tensor with a dimension for its samples, so it cannot be cut into microbatches. "
        "Give the model tensors, with the samples along dimension 0."
    )


def backward_of_share(model: sw.DistributedModel, loss: Tensor, share: Any, *, samples: float) -> None:
    """Runs the backward of ``share * loss``."""
    model.backward(loss * (share / samples), torch.full_like(loss, samples, dtype=loss.dtype))


def counted_labels(labels: Tensor, *, shifted: bool) -> Tensor:
    """The labels that a loss of transformers is the mean over."""
    return (labels[..., 1:] if shifted and labels.dim() > 1 else labels).ne(-100).sum(dtype=torch.float64)


def shifts_labels(module: nn.Module) -> bool:
    """Whether a model's own loss compares position i with label i + 1, as causal language models do."""
    try:
        from transformers import PreTrainedModel
        from transformers.loss.loss_utils import ForCausalLMLoss
    except ImportError:
        return False
    if not isinstance(module, PreTrainedModel) or getattr(module.config, "is_encoder_decoder", False):
        return False
    return module.loss_function is ForCausalLMLoss
