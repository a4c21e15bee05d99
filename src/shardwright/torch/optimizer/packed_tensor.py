"""Moments in 16 or 8 bits.

8 bits are a small floating-point number, as a part of the largest of a block of 256 elements::

    signed     s eeee mmm     from 2^-19 of the largest      first moments
    unsigned   eeeee mmm      from 2^-35 of the largest      second moments

The step between neighbours is an eighth to a sixteenth of the value. Zero and the largest of a block are
exact. Second moments above zero stay above it: updates divide by them.

Rounding is stochastic: a moment that changes by less than a step moves on average as it should. The random
bits come from the value's own bits and a number of the step, so that a value is rounded alike on any rank and
after a resume, and what was unpacked is packed to the same bits again.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NoReturn, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.torch._private.tensors import disabled_torch_function, new_wrapper
from shardwright.torch.pytorch.tree import map_tree

BLOCK = 256
"""Elements that share a scale."""

Format = Literal["bf16", "signed", "unsigned"]

_FACTOR = 0x2C1B3C6D  # odd: mixes the bits of a value with those of the step
_MIDDLE = 8  # of the 2^4 values below the random bits: what computing loses changes no code
_LEAST_SCALE = 2.0**-120
# A code is the upper bits of (value + least), counted from those of `least`: by this, zero is exact.
_LEAST = {"signed": 2.0**-16 * 1.125, "unsigned": 2.0**-32 * 1.125}
_LEAST_BITS = {"signed": (111 << 23) + (1 << 20), "unsigned": (95 << 23) + (1 << 20)}


def _random_bits(bits: Tensor, salt: int) -> Tensor:
    """Of each number, 16 that depend on its bits and the salt; the upper half of an int32."""
    return (bits ^ salt).mul_(_FACTOR)


def to_bf16(values: Tensor, salt: int) -> Tensor:
    """Rounds float32 values up or down, by chance."""
    bits = values.view(torch.int32)
    rounded = _random_bits(bits, salt).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    rounded.add_(bits).bitwise_and_(-0x10000)
    found = rounded.view(torch.float32)
    return torch.where(values.isfinite(), found, values).to(torch.bfloat16)  # a NaN may be all ones


def to_codes(values: Tensor, kind: Format, salt: int) -> tuple[Tensor, Tensor]:
    """Codes, and the scale of each block, of flat float32 values."""
    blocks = _whole_blocks(values).view(-1, BLOCK)
    scales = blocks.abs().amax(1) if kind == "signed" else blocks.amax(1)
    factor = ((1 - _LEAST[kind]) / scales.clamp_min_(_LEAST_SCALE)).unsqueeze(1)
    parts = blocks * factor
    bits = (parts.abs_() if kind == "signed" else parts).add_(_LEAST[kind]).view(torch.int32)
    codes = _random_bits(bits, salt).bitwise_right_shift_(12).bitwise_and_(0xFFFF0)
    codes.add_(bits).add_(_MIDDLE - _LEAST_BITS[kind]).bitwise_right_shift_(20)
    if kind == "signed":
        negative = blocks.view(torch.int32) >> 31
        codes.bitwise_xor_(negative).sub_(negative)
    else:
        codes = torch.maximum(codes, (blocks > 0).to(torch.int32), out=codes)
    return codes.to(torch.uint8).view(-1)[: values.numel()], scales


def from_codes(codes: Tensor, scales: Tensor, kind: Format) -> Tensor:
    """The values that codes stand for."""
    table = _values(kind, codes.device)
    values = table.index_select(0, _whole_blocks(codes).to(torch.int32))
    return values.view(-1, BLOCK).mul_(scales.unsqueeze(1)).view(-1)[: codes.numel()]


def _whole_blocks(flat: Tensor) -> Tensor:
    """The same with zeros behind, up to the end of a block."""
    missing = -flat.numel() % BLOCK
    return F.pad(flat, (0, missing)) if missing else flat


@cache
def _values(kind: Format, device: torch.device) -> Tensor:
    """What each code stands for, as a part of the largest of its block; those from 128 are negative."""
    numbers = torch.arange(256, dtype=torch.int32)
    if kind == "signed":
        numbers = torch.minimum(numbers, 256 - numbers).clamp_max_(127)
    found = ((numbers << 20) + _LEAST_BITS[kind]).view(torch.float32).double()
    found = (found - _LEAST[kind]) / (1 - _LEAST[kind])
    if kind == "signed":
        found[128:] *= -1
    return found.float().to(device)


class PackedTensor(torch.Tensor):
    """A moment that shows the type it had before it was packed. Operations get it unpacked."""

    codes: Tensor
    scales: Tensor | None
    kind: Format

    __torch_function__ = disabled_torch_function

    @classmethod
    def of(
        cls, codes: Tensor, scales: Tensor | None, kind: Format, shape: torch.Size, dtype: torch.dtype
    ) -> Self:
        """A tensor of this shape and type, from its flat codes."""
        made: Any = new_wrapper(cls, shape, dtype=dtype, device=codes.device)
        made.codes, made.scales, made.kind = codes, scales, kind
        return made  # type: ignore[no-any-return]

    @classmethod
    def empty(cls, like: Tensor, kind: Format, device: torch.device) -> Self:
        """Memory for a tensor of the shape and type of another one."""
        dtype = torch.bfloat16 if kind == "bf16" else torch.uint8
        codes = torch.empty(like.numel(), dtype=dtype, device=device)
        scales = None if kind == "bf16" else codes.new_empty(-(-like.numel() // BLOCK), dtype=torch.float32)
        return cls.of(codes, scales, kind, like.shape, like.dtype)

    def write(self, start: int, values: Tensor, salt: int) -> None:
        """Packs flat values, which begin with a block."""
        stop, values = start + values.numel(), values.to(torch.float32)
        if self.scales is None:
            self.codes[start:stop] = to_bf16(values, salt)
            return
        self.codes[start:stop], self.scales[start // BLOCK : -(-stop // BLOCK)] = to_codes(
            values, self.kind, salt
        )

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Unpacks a flat range, which begins with a block."""
        stop = self.numel() if stop is None else stop
        if self.scales is None:
            return self.codes[start:stop].to(self.dtype)
        scales = self.scales[start // BLOCK : -(-stop // BLOCK)]
        return from_codes(self.codes[start:stop], scales, self.kind).to(self.dtype)

    def unpacked(self) -> Tensor:
        """What it stands for."""
        return self.read().view(self.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        own = args[0]
        if any(isinstance(written, PackedTensor) for written in _written(func, args, kwargs)):
            _refuse_writing()
        keeps = func in _KEEPING and isinstance(own, PackedTensor)
        if keeps and kwargs.get("dtype") in (None, own.dtype):
            device = {"device": kwargs["device"]} if kwargs.get("device") else {}
            scales = None if own.scales is None else func(own.scales, **device)
            return cls.of(func(own.codes, **device), scales, own.kind, own.shape, own.dtype)
        args, kwargs = map_tree(unpacked, (args, kwargs))
        return func(*args, **kwargs)

    def __setitem__(self, key: Any, value: Any) -> None:
        _refuse_writing()

    def numpy(self, *, force: bool = False) -> Any:
        """A copy of what it stands for."""
        return self.unpacked().numpy(force=force)

    def tolist(self) -> Any:
        """What it stands for, as Python numbers."""
        return self.unpacked().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.unpacked().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedTensor({tuple(self.shape)}, {self.dtype}, {self.kind})"


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """What an operation writes into."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from given if isinstance(given, list | tuple) else (given,)


def _refuse_writing() -> NoReturn:
    raise UsageError(
        "a moment that optimizer_state keeps in fewer bits is changed in place, which would change nothing. "
        "Assign what it is to be: optimizer.state[parameter][key] = tensor."
    )


_ATEN = torch.ops.aten
_KEEPING = (_ATEN.detach.default, _ATEN.clone.default, _ATEN._to_copy.default)


def unpacked(value: Any) -> Any:
    """What a moment stands for; anything else as it is."""
    return value.unpacked() if isinstance(value, PackedTensor) else value


def memory_of_moment(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold a moment; any other tensor by itself."""
    if not isinstance(tensor, PackedTensor):
        return [tensor]
    return [tensor.codes] if tensor.scales is None else [tensor.codes, tensor.scales]
