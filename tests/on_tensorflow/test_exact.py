"""A step over two ranks gives what a plain script gives, for models and schedules of every kind.

Pieces are graphs of their own, in which TensorFlow may fuse other operations than in the whole. So results
are equal to the bit where it fuses the same, and up to rounding elsewhere.
"""

import pytest
from keras_training import assert_equal, results

NAMES = ["conv", "again", "unet", "recurrent", "gpt", "clip", "metric", "get_gradients", "perceptron"]
INTERLEAVED = (("pipeline", "interleaved_1f1b"), ("virtual_stages", 2))
MEASURED = (("profile", "measured"), ("measure_s", 0.5))
RECOMPUTED = (("activation_checkpointing", "full"),)
# Each kind of model, schedule, measuring and recomputation once.
CASES = (
    *((name, 4, (), False) for name in NAMES),
    ("unet", 7, (("pipeline", "gpipe"),), True),
    ("gpt", 4, INTERLEAVED, True),
    ("unet", 4, (("pipeline", "zb_v"), ("virtual_stages", 2)), False),
    ("metric", 7, (), True),
    ("gpt", 4, MEASURED, False),
    ("unet", 4, (*RECOMPUTED, *INTERLEAVED), False),
)
# In each `make test`: even and uneven microbatches, one stage a rank and two, a backward in two halves.
EVERY_RUN = (
    ("conv", 4, (), False),
    ("recurrent", 4, (), False),
    ("unet", 7, (("pipeline", "gpipe"),), True),
    ("gpt", 4, INTERLEAVED, True),
    ("unet", 4, (("pipeline", "zb_v"), ("virtual_stages", 2)), False),
    ("metric", 7, (), True),
)
THOROUGH = tuple(case for case in CASES if case not in EVERY_RUN)
# With legacy Keras as well: each kind of model, and of the rest what goes through its own code.
WITH_LEGACY = (*CASES[: len(NAMES)], ("gpt", 4, INTERLEAVED, True), ("metric", 7, (), True))
TOLERANCE = 1e-6


def _name(case):
    name, microbatches, settings, in_function = case
    words = [name, str(microbatches), *(str(value) for _, value in settings), *["in_function"] * in_function]
    return "-".join(words)


def _assert_equal(case, cases, *, legacy=False):
    expected, found = results(cases, legacy=legacy)
    assert_equal(expected[case[:2]], found[case], tolerance=TOLERANCE)


@pytest.mark.parametrize("case", EVERY_RUN, ids=_name)
def test_two_ranks_give_what_a_plain_script_gives(case):
    _assert_equal(case, EVERY_RUN)


@pytest.mark.sweep
@pytest.mark.parametrize("case", THOROUGH, ids=_name)
def test_more_of_them(case):
    _assert_equal(case, THOROUGH)


@pytest.mark.thorough
@pytest.mark.parametrize("case", WITH_LEGACY, ids=_name)
def test_two_ranks_of_legacy_keras_give_what_a_plain_script_gives(case):
    _assert_equal(case, WITH_LEGACY, legacy=True)
