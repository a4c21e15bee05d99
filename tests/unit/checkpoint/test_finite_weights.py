"""Checkpoints with infinities or NaN: three saves of them deleted the last good one, and all were ok."""

from pathlib import Path

import numpy as np
import pytest

from checkpoint.checkpoints import pair, save, save_bad
from shardwright.checkpoint.disk import Manifest
from shardwright.checkpoint.float_types import NotFinite, not_finite
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.run.saving import not_finite_in

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


def test_whole_numbers_are_finite():
    assert not_finite(np.full(4, -1, "<i8").tobytes(), "I64") == NotFinite()
    assert not_finite(np.uint8([0x7E, 0x7F]).tobytes(), "F8_E4M3") == NAN


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
