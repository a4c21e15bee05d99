"""Zeros the padded outputs of `nn.TransformerEncoder` between units, as plain evaluation does.

Without gradients, PyTorch's encoder takes a fast path when it is given a padding mask: it packs the sequences
into a nested tensor, which leaves zeros at the padded places. It does not while torch functions are
intercepted, as between the units of a step function: the padded places then hold what the layers computed. A
reader of them, such as a mean over the sequence, would differ from a plain loop.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.torch.interception.glue import active_handler

__all__ = ["padded_encoders"]


@contextmanager
def padded_encoders() -> Iterator[None]:
    """Encoders that are called between units give what the nested way gives."""
    kind: Any = nn.TransformerEncoder
    plain = kind.forward

    def forward(
        self: nn.TransformerEncoder,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Any:
        if (
            active_handler() is None
            or mask is not None
            or src_key_padding_mask is None
            or not _may_pack(self, src)
        ):
            return plain(self, src, mask, src_key_padding_mask, is_causal)
        output = src
        for layer in self.layers:
            output = layer(output, is_causal=bool(is_causal), src_key_padding_mask=src_key_padding_mask)
        is_padding = src_key_padding_mask
        if is_padding.dtype != torch.bool:  # numbers that are added to the scores
            is_padding = is_padding != 0
        if getattr(self, "mask_check", True):  # padding elsewhere keeps PyTorch from packing
            is_padding = is_padding & (is_padding[:, 1:] >= is_padding[:, :-1]).all()
        output = output.masked_fill(is_padding.unsqueeze(-1), 0.0)
        return output if self.norm is None else self.norm(output)

    kind.forward = forward
    try:
        yield
    finally:
        kind.forward = plain


def _may_pack(encoder: nn.TransformerEncoder, src: Tensor) -> bool:
    """Whether a plain call makes a nested tensor if the mask allows it (in PyTorch 2.11 to 2.13)."""
    first: Any = encoder.layers[0]
    trains = src.requires_grad or any(p.requires_grad for p in first.parameters())
    return (
        torch.backends.mha.get_fastpath_enabled()
        and getattr(encoder, "use_nested_tensor", False)
        and not first.training
        and src.dim() == 3
        and not torch.is_autocast_enabled()
        and not (trains and torch.is_grad_enabled())
    )
