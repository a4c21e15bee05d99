"""Converts raw bytes between floating-point types, as PyTorch does.

numpy has no BF16 and no 8-bit types. All conversions go through F32, which holds each of the small types
exactly; F64 is rounded to F32 first, as in PyTorch.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
"""Types that can be converted."""

_PIECE = 2**18  # numbers that are looked at together: they fit into a cache

_Array = NDArray[Any]
_Bits = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Converted:
    """Numbers of another type.

    Attributes:
        num_overflowed: how many were finite, and are not any more.
    """

    data: bytes
    num_overflowed: int


def converted(data: bytes | bytearray | memoryview, *, source: str, target: str) -> _Converted:
    """Converts numbers, each to the nearest one, and to the even one of two that are as near.

    >>> converted(np.float32(1.00390625).tobytes(), source="F32", target="BF16").data.hex()
    '803f'
    """
    if source == target:
        return _Converted(bytes(data), 0)
    numbers = _as_f32(data, source)
    made = _from_f32(numbers, target)
    lost = _is_infinite(made, target) & ~_is_infinite(_items(data, source), source)
    return _Converted(made.tobytes(), int(lost.sum()))


@dataclass(frozen=True, slots=True)
class NotFinite:
    """The kinds of non-finite numbers in some data."""

    nan: bool = False
    infinite: bool = False


def not_finite(data: bytes | bytearray | memoryview, dtype: str) -> NotFinite:
    """Looks for infinities and NaN; about as fast as memory is read, where there are none.

    >>> not_finite(np.float32([1.0, np.inf]).tobytes(), "F32")
    NotFinite(nan=False, infinite=True)
    """
    dtype = {"C64": "F32", "C128": "F64"}.get(dtype, dtype)
    if dtype not in FLOATS:
        return NotFinite()
    items = _items(data, dtype)
    nan = infinite = False
    for begin in range(0, len(items), _PIECE):
        piece = items[begin : begin + _PIECE]
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = piece if dtype in ("F32", "F64") else _as_f32(piece.tobytes(), dtype)
            if np.isfinite(numbers.sum()):
                continue
        nan |= bool(np.isnan(numbers).any())
        infinite |= bool(np.isinf(numbers).any())
    return NotFinite(nan, infinite)


def _items(data: bytes | bytearray | memoryview, dtype: str) -> _Array:
    """The numbers of a type, as numpy has them, or as bare bits where it has no such type."""
    return np.frombuffer(data, _NUMPY[dtype])


def _as_f32(data: bytes | bytearray | memoryview, dtype: str) -> NDArray[np.float32]:
    items = _items(data, dtype)
    if dtype == "BF16":
        return (items.astype("<u4") << 16).view("<f4")
    if dtype == "F8_E5M2":  # the upper half of F16
        return (items.astype("<u2") << 8).view("<f2").astype("<f4")
    if dtype == "F8_E4M3":
        numbers: NDArray[np.float32] = _e4m3()[items]
        return numbers
    with np.errstate(over="ignore", invalid="ignore"):
        return items.astype("<f4")


def _from_f32(numbers: NDArray[np.float32], dtype: str) -> _Array:
    if dtype != "BF16":
        with np.errstate(over="ignore", invalid="ignore"):
            return numbers.astype(_NUMPY[dtype])
    bits = numbers.view("<u4")
    # Half of the last bit that stays, less one where that bit is 0: halves go to the even neighbour.
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded).astype("<u2")


def _is_infinite(items: _Array, dtype: str) -> _Bits:
    infinite: _Bits
    if dtype == "BF16":
        infinite = (items & 0x7FFF) == 0x7F80
    elif dtype == "F8_E5M2":
        infinite = (items & 0x7F) == 0x7C
    elif dtype == "F8_E4M3":  # has no infinities
        infinite = np.zeros(items.shape, bool)
    else:
        infinite = np.isinf(items)
    return infinite


@cache
def _e4m3() -> NDArray[np.float32]:
    """The 256 numbers of F8_E4M3: 4 bits of exponent, 3 of mantissa, all ones is no number."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -size, size).astype("<f4")


_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1"}
