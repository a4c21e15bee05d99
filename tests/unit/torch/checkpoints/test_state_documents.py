"""The state of a checkpoint that somebody has changed, checksums included: one error, no traceback."""

import copy
import re

import pytest
import torch

from shardwright.errors import CorruptCheckpointError
from shardwright.mesh import Mesh
from shardwright.torch.checkpoints.snapshot import (
    RankDocument,
    StateDocument,
    generator_states,
    set_generators,
)

GOOD = {
    "step": 2,
    "layout": {"world_size": 2, "pipeline": 2, "data": 1, "shard": 1, "placement": "DPT"},
    "optimizers": [{"groups": [{"lr": 0.1}], "members": [["weight"]], "others": {}}],
    "states_of_ranks": {"sampler": {"0": 1, "1": 2}},
    "random": {"0": {}, "1": {}},
}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("random",), {}, "random must have one entry for each of the 2 ranks"),
        (("random",), {"0": {}, "2": {}}, "random must have one entry for each of the 2 ranks"),
        (("states_of_ranks", "sampler"), {"0": 1}, "sampler must have one entry for each of the 2 ranks"),
        (("layout", "world_size"), 2**62, "must have one entry for each of the 4611686018427387904 ranks"),
        (("layout",), None, "must have one entry for each of the 0 ranks"),
        (("optimizers", 0, "groups", 0), True, "optimizers.0.groups.0 is True, but it must be an object"),
        (("optimizers", 0, "groups", 0), "x", "optimizers.0.groups.0 is 'x', but it must be an object"),
    ],
)
def test_what_ranks_would_look_for_in_vain(path, value, said):
    """Resuming ended in a bare KeyError or TypeError."""
    assert StateDocument.from_content(GOOD, name="state.json").step == 2
    found = copy.deepcopy(GOOD)
    inside = found
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    with pytest.raises(CorruptCheckpointError, match=re.escape(said)):
        StateDocument.from_content(found, name="state.json")


def test_calls_are_kept_only_where_they_are_not_the_steps():
    """Older versions refuse fields that they do not know: no checkpoint of a plain loop has any."""
    document = RankDocument(optimizers=[], loss_scale=None, extra_states={}, states={}, random={}, buffers={})
    mesh = Mesh.of(world_size=1)
    plain, accumulated = (
        StateDocument.joined(2, mesh, [document], alike={}, calls=calls) for calls in (2, 4)
    )
    assert (plain.calls, accumulated.calls) == (None, 4)
    assert "calls" not in plain.to_content()


@pytest.mark.parametrize("change", [{"python": ()}, {"python": (3, (-1,) * 625, None)}, {"numpy": []}, None])
def test_generators_that_are_none(change):
    before = generator_states(torch.device("cpu"))
    wrong = [] if change is None else {**before, **change}
    try:
        with pytest.raises(CorruptCheckpointError, match="the checkpoint's random generators cannot be used"):
            set_generators(wrong, torch.device("cpu"))
    finally:
        set_generators(before, torch.device("cpu"))
