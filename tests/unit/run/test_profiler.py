"""Times of one unit are put together."""

from types import SimpleNamespace

import pytest
import torch

from shardwright.config import Config
from shardwright.profile import Profile, UnitCost
from shardwright.run.profiler import Profiler, ToProfile, _inferred, typical
from shardwright.run.timing import Share, Timing


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


class Scripted(Profiler):
    """Finds what it is told to, one after the other."""

    def __init__(self, *whole_s):
        context = SimpleNamespace(
            rank=0,
            local_rank=0,
            local_size=1,
            device=torch.device("cpu"),
            mesh=SimpleNamespace(world_size=1),
            from_all_ranks=lambda fact: [fact],
            config=Config(),
        )
        super().__init__(context, time_class=None)
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
    profiler._cache.write(kept)
    told, outdated = profiler._known({"dearest": None, "cheap": None})
    assert told == (kept if holds else {})
    assert outdated.keys() == (set() if holds else {"dearest", "cheap"})
    if not holds:
        assert outdated["dearest"].whole_s == pytest.approx(found[-1])
        assert outdated["cheap"].whole_s == pytest.approx(0.3 * found[-1])
    assert not profiler.found


def cost(seconds, provenance="estimated"):
    return UnitCost(forward_s=seconds / 3, backward_s=2 * seconds / 3, provenance=provenance)


def inferred(skipped, measured):
    """Seconds of classes that were not timed; each is called by its kind and its microbatches."""
    estimated = {"block/2": 8.0, "block/4": 4.0, "block/8": 2.0, "head/2": 3.0}
    sizes = [ToProfile(2, None, Profile(costs={key: cost(s) for key, s in estimated.items()}))]
    shares = {key: Share(key.partition("/")[0], 1.0, int(key.partition("/")[2])) for key in estimated}
    costs = {key: cost(seconds, "measured") for key, seconds in measured.items()}
    found = _inferred(skipped, sizes, costs, shares)
    return {
        key: (pytest.approx(each.forward_s + each.backward_s), each.spread) for key, each in found.items()
    }


def test_between_two_sizes_seconds_lie_on_the_line_through_them():
    """A call takes one second besides its data: from one size alone, small microbatches looked too cheap."""
    assert inferred(["block/4"], {"block/2": 5.0, "block/8": 2.0}) == {"block/4": (3.0, 0.1)}


def test_from_one_size_or_from_other_kinds_the_ratio_to_the_estimate_holds():
    assert inferred(["block/4"], {"block/2": 4.0}) == {"block/4": (2.0, 0.5)}
    assert inferred(["head/2"], {"block/2": 4.0, "block/4": 2.0}) == {"head/2": (1.5, 0.5)}
    assert inferred(["head/2"], {}) == {"head/2": (3.0, 0.5)}
