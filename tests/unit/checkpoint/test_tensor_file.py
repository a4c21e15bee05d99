"""Files of tensors are those of the safetensors library; boxes in tensors; the list of tensors.

Conversions between floating-point types are those of PyTorch.

Checkpoints with infinities or NaN: three saves of them deleted the last good one, and all were ok.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoint.checkpoints import pair, save, save_bad
from shardwright.checkpoint.disk import Manifest
from shardwright.checkpoint.float_types import FLOATS, NotFinite, converted, not_finite
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.checkpoint.tensor_index import Piece, TensorEntry, TensorIndex
from shardwright.errors import CheckpointError
from shardwright.run.saving import not_finite_in


def _entry(*pieces: tuple[int, int], dtype: str = "F32") -> dict[str, TensorEntry]:
    made = tuple(Piece(file="f", key="w", offset=(o,), shape=(n,)) for o, n in pieces)
    return {"w": TensorEntry(dtype=dtype, shape=(4,), pieces=made)}


@pytest.mark.parametrize("parts", [[(0, 1)], [(0, 3), (2, 2)], [(0, 4), (0, 4)], [(0, 5)]])
def test_gaps_and_overlaps_are_not_committed(parts: list[tuple[int, int]]) -> None:
    with pytest.raises(CheckpointError, match="parts of w are missing, or there twice"):
        TensorIndex.joined([_entry(*parts)])


def test_ranks_that_disagree_are_told() -> None:
    with pytest.raises(CheckpointError, match="Build the same model on every rank"):
        TensorIndex.joined([_entry((0, 2)), _entry((2, 2), dtype="F64")])


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


NAN, INFINITE = NotFinite(nan=True), NotFinite(infinite=True)


@pytest.mark.parametrize(
    ("dtype", "numpy", "one", "nan", "infinity"),
    [
        ("F64", "<f8", 1.0, np.nan, -np.inf),
        ("F32", "<f4", 3e38, np.nan, np.inf),  # the sum of two of them is infinite
        ("F16", "<f2", 6e4, np.nan, np.inf),
        ("BF16", "<u2", 0x3F80, 0x7FC0, 0xFF80),
        ("F8_E5M2", "u1", 0x3C, 0x7F, 0x7C),
        ("C64", "<c8", 1j, complex(0, np.nan), complex(np.inf, 0)),
    ],
)
def test_infinities_and_nan_are_found_in_every_type(dtype, numpy, one, nan, infinity):
    def looked(*at_end: object) -> NotFinite:
        numbers = np.full(2**18 + 5, one, numpy)  # longer than what is looked at together
        numbers[len(numbers) - len(at_end) :] = at_end
        return not_finite(numbers.tobytes(), dtype)

    assert looked() == NotFinite()
    assert looked(nan) == NAN
    assert looked(infinity) == INFINITE


def test_a_mask_may_be_infinite_and_so_may_the_state_of_an_optimizer():
    parts = [
        pair("model/weight", float("inf")),
        pair("model/mask", float("-inf")),
        pair("model/running_mean", float("nan")),
        pair("optimizer/weight/exp_avg", float("nan")),
    ]
    assert not_finite_in(parts, parameters={"model/weight"}) == ["weight", "running_mean"]


def names(root: Path) -> list[int]:
    return [commit.step for commit in CheckpointFolder(root).commits()]


def test_the_last_finite_one_stays(tmp_path):
    save(tmp_path, 1, keep=2)
    save(tmp_path, 2, keep=2)
    for step in (3, 4, 5):
        save_bad(tmp_path, step, keep=2)
    assert names(tmp_path) == [2, 4, 5]
    save(tmp_path, 6, keep=2)
    assert names(tmp_path) == [5, 6]
    save_bad(tmp_path, 7, keep=1)
    assert names(tmp_path) == [6, 7]


def test_a_finite_one_has_the_manifest_that_it_always_had(tmp_path):
    """Readers of before refuse fields that they do not know."""
    assert b"not_finite" not in Manifest(step=1, files={}).to_bytes()
    save_bad(tmp_path, 3, keep=1)
    saved = CheckpointFolder(tmp_path).open()
    assert (saved.has_finite_weights, saved.not_finite) == (False, ("w",))
