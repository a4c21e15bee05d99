"""Turns queries and keys by their positions.

Shapes: N samples, S positions, A heads, D channels of a head, R of these that are turned.
"""

import torch
from torch import Tensor

from smdistributed.modelparallel.torch.nn.distributed.options import Rotary


def turned(query: Tensor, key: Tensor, positions: Tensor | None, rotary: Rotary) -> list[Tensor]:
    """Both, turned.

    Args:
        positions: (N or 1, S) whole numbers; None for 0, 1, 2 and so on.
    """
    if positions is None:
        positions = torch.arange(query.shape[1], device=query.device)[None]
    cos, sin = _tables(positions, query.dtype, rotary)
    return [_turned(each, cos, sin, rotary) for each in (query, key)]


def _tables(positions: Tensor, dtype: torch.dtype, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """(N or 1, S, 1, R) each."""
    channels = torch.arange(0, rotary.num_channels, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / rotary.base ** (channels / rotary.num_channels)
    angles = positions[:, :, None].float() * frequencies
    if rotary.interleaved:
        angles = angles.repeat_interleave(2, dim=-1)
    else:
        angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype)[:, :, None], angles.sin().to(dtype)[:, :, None]


def _turned(tensor: Tensor, cos: Tensor, sin: Tensor, rotary: Rotary) -> Tensor:
    turning, rest = tensor[..., : rotary.num_channels], tensor[..., rotary.num_channels :]
    if rotary.interleaved:
        across = torch.stack((-turning[..., 1::2], turning[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = turning.chunk(2, dim=-1)
        across = torch.cat((-second, first), dim=-1)
    result = turning * cos + across * sin
    return result if rest.shape[-1] == 0 else torch.cat((result, rest), dim=-1)
