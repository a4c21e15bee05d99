"""What `clip_grad_norm_` is made of."""

import inspect
from collections.abc import Callable, Sequence
from types import FrameType

import torch
from torch.nn.utils import clip_grad

__all__ = ["norms_of", "parameters_to_clip", "replace_total_norm"]


def replace_total_norm(make: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]) -> None:
    """Puts a function in the place of the one that `clip_grad_norm_` takes norms by.

    Scripts import `clip_grad_norm_` by name before the library could replace it; what it calls is looked up.
    """
    original = clip_grad._get_total_norm
    if getattr(original, "__module__", None) != clip_grad.__name__:
        return  # replaced already
    replacement = make(original)
    clip_grad._get_total_norm = replacement
    if getattr(torch.nn.utils, "get_total_norm", None) is original:
        torch.nn.utils.get_total_norm = replacement


def parameters_to_clip(caller: FrameType) -> Sequence[torch.Tensor]:
    """The parameters of `clip_grad_norm_`, if that asks for a norm: it passes on the gradients alone."""
    if caller.f_code is not inspect.unwrap(clip_grad.clip_grad_norm_).__code__:
        return ()
    return tuple(caller.f_locals.get("parameters", ()))


def norms_of(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The norm of each of some tensors of one type and device, in float32 at least.

    On GPUs this is a kernel or two for all of them, as in `torch.nn.utils.clip_grad_norm_`; a function for it
    is not public.
    """
    wide = torch.float32 if tensors[0].dtype in (torch.float16, torch.bfloat16) else None
    norms: Sequence[torch.Tensor] = torch._foreach_norm(list(tensors), 2.0, dtype=wide)
    return norms
