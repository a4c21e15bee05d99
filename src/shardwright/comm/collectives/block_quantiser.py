"""Quantises numbers to 8 bits, a scale per block, as in ZeRO++ (Wang et al., 2023, section 3.1).

::

    | x0 x1 ... x255 | x256 ... x511 | ...              any floating-point type
    | q0 q1 ... q255 | q256 ... q511 | ... | s0 | s1 | ...   int8, then float32

    x = s q, with s = max |x| / 127 of the block
"""

import math
import threading

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["BlockQuantiser"]

_LARGEST = 127


class BlockQuantiser:
    """Packs numbers into bytes, and counts the loss.

    Attributes:
        largest_error: of a number that was packed, relative to the largest of its block: at most 1 / 254.

    >>> quantiser = BlockQuantiser(block=4)
    >>> packed = quantiser.pack(torch.tensor([0.0, 1.0, -2.0, 127.0]))
    >>> quantiser.unpack(packed, torch.empty(4)).tolist()
    [0.0, 1.0, -2.0, 127.0]
    """

    def __init__(self, block: int = 256):
        self._block = block
        self._counting = threading.Lock()
        self.reset()

    @property
    def relative_error(self) -> float:
        """Norm of what packing lost, relative to the norm of all that was packed."""
        return math.sqrt(self._squared_error / self._squared_norm) if self._squared_norm else 0.0

    def reset(self) -> None:
        """Counts from now on."""
        with self._counting:
            self._squared_error = self._squared_norm = self.largest_error = 0.0

    def num_bytes(self, count: int) -> int:
        """Bytes of so many numbers, packed."""
        return count + 4 * -(-count // self._block)

    def pack(self, numbers: Tensor) -> Tensor:
        """Packs numbers; returns (num_bytes(n),), uint8."""
        count = numbers.numel()
        blocks = F.pad(numbers.float(), (0, -count % self._block)).view(-1, self._block)
        scales = blocks.abs().amax(1) / _LARGEST
        quotients = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        levels = quotients.round().clamp_(-_LARGEST, _LARGEST)
        self._count_loss(blocks, levels * scales[:, None], scales)
        packed = levels.to(torch.int8).view(-1)[:count]
        return torch.cat([packed.view(torch.uint8), scales.view(torch.uint8)])

    def unpack(self, packed: Tensor, numbers: Tensor) -> Tensor:
        """Unpacks numbers into a tensor (n,), which is returned."""
        count = numbers.numel()
        levels = F.pad(packed[:count].view(torch.int8).float(), (0, -count % self._block))
        scales = packed[count:].clone().view(torch.float32)
        return numbers.copy_((levels.view(-1, self._block) * scales[:, None]).view(-1)[:count])

    def _count_loss(self, blocks: Tensor, rounded: Tensor, scales: Tensor) -> None:
        difference = rounded - blocks
        relative = difference.abs().amax(1) / (scales * _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        error, norm = difference.square().sum().item(), blocks.square().sum().item()
        with self._counting:  # both hops of a sum are packed, each in a thread of its own
            self._squared_error += error
            self._squared_norm += norm
            if relative.numel():
                self.largest_error = max(self.largest_error, relative.max().item())
