"""Conversions between floating-point types are those of PyTorch."""

import itertools

import numpy as np
import pytest
import torch

from shardwright.checkpoint.float_types import FLOATS, converted

_TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_TARGETS = ("F32", "F16", "BF16")


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _tensor(data: bytes, dtype: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=_TORCH[dtype])


def _numbers() -> torch.Tensor:
    """Numbers of all sizes in float64, with ties between neighbours, subnormal ones, infinities and NaN."""
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (bits[:50_000] & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    halves = (bits[50_000:100_000] & np.uint32(0xFFFFE000)) | np.uint32(0x1000)
    with np.errstate(invalid="ignore"):
        found = np.concatenate([bits, ties, halves]).view(np.float32).astype(np.float64)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.9, 65520, 3.4028235e38, 1e300, -1e-300, 6e-8]
    return torch.from_numpy(np.concatenate([found, special]))


@pytest.mark.parametrize(("source", "target"), list(itertools.product(FLOATS, _TARGETS)))
def test_as_pytorch_does_it(source: str, target: str) -> None:
    tensor = _numbers().to(torch.float32).to(_TORCH[source]) if source != "F64" else _numbers()
    if source in ("F16", "BF16"):
        tensor = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(_TORCH[source])
    if source.startswith("F8"):
        tensor = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(_TORCH[source])
    expected = tensor.to(_TORCH[target])
    made = converted(_bytes(tensor), source=source, target=target)
    found = _tensor(made.data, target)
    numbers = ~expected.isnan()
    assert torch.equal(found.isnan(), ~numbers)
    bits = torch.int32 if target == "F32" else torch.int16
    assert torch.equal(found[numbers].view(bits), expected[numbers].view(bits))
    lost = expected.float().isinf() & ~tensor.double().isinf()
    assert made.num_overflowed == int(lost.sum())
    if source == "F64" or (source, target) == ("BF16", "F16"):
        assert made.num_overflowed > 0


@pytest.mark.parametrize("dtype", _TARGETS)
def test_the_same_type_stays_as_it_is_to_the_bit(dtype: str) -> None:
    """Also a NaN with bits of its own."""
    data = b"\x01\x7f\xff\xff" * 3
    assert converted(data, source=dtype, target=dtype).data == data
    assert converted(b"", source="F64", target=dtype).data == b""
