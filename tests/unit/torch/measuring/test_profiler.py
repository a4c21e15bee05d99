"""Times of one unit are put together."""

from types import SimpleNamespace

import pytest
import torch

from shardwright.config import Config
from shardwright.torch.measuring.measure import Timing
from shardwright.torch.measuring.profiler import Profiler, rounds_of, typical


def timing(forward_s, backward_s):
    return Timing(
        forward_s=forward_s,
        backward_s=backward_s,
        input_s=backward_s / 2,
        weight_s=backward_s / 2,
        spread=0.0,
    )


def test_the_medians_of_the_rounds_count():
    found = typical([timing(1.1, 2.1), timing(1.3, 2.0), timing(1.0, 2.4)])
    assert found == timing(1.1, 2.1)


def test_rounds_in_which_the_machine_was_slow_do_not_count():
    slow, fast = timing(1.5, 3.5), timing(1.0, 2.0)
    assert typical([slow, fast, fast]) == typical([fast, slow, fast, slow, fast]) == typical([fast]) == fast


def test_a_model_is_measured_for_as_long_as_a_disturbance_lasts_or_eight_times():
    assert rounds_of(1e-3) == 8
    assert 3 < rounds_of(1.0) < 8
    assert rounds_of(60.0) == 3


class Scripted(Profiler):
    """Finds what it is told to, one after the other."""

    def __init__(self, *whole_s):
        context = SimpleNamespace(
            rank=0,
            local_rank=0,
            local_size=1,
            device=torch.device("cpu"),
            mesh=SimpleNamespace(world_size=1),
            config=Config(),
        )
        super().__init__(context)
        self.found = [None if s is None else timing(s / 3, 2 * s / 3) for s in whole_s]

    def _measure_together(self, trace, key):
        assert key == "dearest"
        return self.found.pop(0)


@pytest.mark.parametrize(
    ("found", "holds"),
    [
        ([1.1], True),
        ([0.9], True),
        ([1.4, 1.3, 1.1], True),
        ([1.4, 1.3, 1.2], False),
        ([0.7, 0.7, 0.7], False),
        ([None], True),
    ],
)
def test_costs_hold_where_the_dearest_is_still_the_same(found, holds, monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    profiler = Scripted(*found)
    kept = {"cheap": timing(0.1, 0.2), "dearest": timing(1 / 3, 2 / 3), "of another model": timing(9.0, 9.0)}
    profiler._cache.add(kept, to={})
    assert profiler._known({"dearest": None, "cheap": None}) == (kept if holds else {})
    assert not profiler.found


def test_models_that_are_new_are_not_compared(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    profiler = Scripted()
    profiler._cache.add({"of another model": timing(9.0, 9.0)}, to={})
    assert profiler._known({"new": None}).keys() == {"of another model"}
