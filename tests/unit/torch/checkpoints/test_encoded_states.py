"""States as JSON: everything comes back, or is refused by the place where it is.

The state of a checkpoint that somebody has changed, checksums included: one error, no traceback.

Signals that ask a run to save and end.

A folder of its own for each checkpoint, as loops of other libraries have it.
"""

import copy
import json
import os
import random
import re
import signal
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import SequentialLR

import shardwright.torch as sw
from shardwright.errors import CheckpointError, CorruptCheckpointError
from shardwright.mesh import Mesh
from shardwright.torch.checkpoints.encoded import decode, encode
from shardwright.torch.checkpoints.saves import SaveSignals
from shardwright.torch.checkpoints.snapshot import (
    RankDocument,
    StateDocument,
    generator_states,
    set_generators,
)

_KEYS = st.text(max_size=4) | st.integers() | st.booleans() | st.just("$tuple")
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(_KEYS, inner, max_size=4)
        | st.lists(inner, max_size=3).map(deque)
        | st.sets(st.integers(), max_size=1)  # of more, the order may change
    ),
    max_leaves=12,
)


def _there_and_back(value: object) -> object:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, name="extra", tensors=tensors), allow_nan=False)
    return decode(json.loads(text), name="extra", tensor=tensors.__getitem__)


@given(_VALUES)
def test_values_come_back(value: object) -> None:
    found = _there_and_back(value)
    assert found == value
    assert repr(found) == repr(value)


def test_states_of_generators_and_schedulers_come_back() -> None:
    generator = random.Random(3)
    state = generator.getstate()
    expected = generator.random()
    generator.setstate(_there_and_back(state))  # type: ignore[arg-type]
    assert generator.random() == expected
    numbers = np.random.RandomState(3)
    before = numbers.get_state()
    drawn = numbers.rand()
    numbers.set_state(_there_and_back(before))  # type: ignore[arg-type]
    assert numbers.rand() == drawn
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    scheduler = SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.StepLR(optimizer, 2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
        ],
        milestones=[3],
    )
    assert _there_and_back(scheduler.state_dict()) == scheduler.state_dict()


class _Own:
    pass


def test_code_and_objects_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"scheduler\.lambdas\[1\] is a builtins\.function"):
        encode({"lambdas": [None, lambda step: step]}, name="scheduler", tensors={})
    with pytest.raises(CheckpointError, match=r"extra\.x is a .*_Own, which cannot be saved"):
        encode({"x": _Own()}, name="extra", tensors={})
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode(endless, name="extra", tensors={})
    with pytest.raises(CheckpointError, match="array of object"):
        encode(np.array([_Own()]), name="extra", tensors={})


@pytest.mark.parametrize(
    "document",
    [
        {"$eval": "1"},
        {"$tuple": 3},
        {"$dict": [[1, 2, 3]]},
        {"$dict": [[{"a": 1}, 2]]},
        {"$dtype": "load"},
        {"$dtype": "nothing"},
        {"$device": "nowhere"},
        {"$float": "1e5"},
        {"$bytes": "zz"},
        {"$deque": [1]},
        {"$tensor": "missing"},
    ],
)
def test_what_nobody_encodes_is_refused(document: object) -> None:
    def missing(name: str) -> torch.Tensor:
        raise CorruptCheckpointError(f"no tensor {name}")

    with pytest.raises(CorruptCheckpointError):
        decode([document], name="extra", tensor=missing)


@pytest.mark.parametrize("name", [name for name in dir(torch.optim.lr_scheduler) if name.endswith("LR")])
def test_every_scheduler_of_pytorch(name: str) -> None:
    """Also those whose state has a Counter."""
    options: dict[str, dict[str, object]] = {
        "LambdaLR": {"lr_lambda": lambda step: 0.9**step},
        "MultiplicativeLR": {"lr_lambda": lambda step: 0.9},
        "StepLR": {"step_size": 2},
        "MultiStepLR": {"milestones": [1, 3, 3]},
        "ExponentialLR": {"gamma": 0.9},
        "CosineAnnealingLR": {"T_max": 5},
        "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0, "cycle_momentum": False},
        "OneCycleLR": {"max_lr": 1.0, "total_steps": 9},
        "SequentialLR": {},
    }
    kind = getattr(torch.optim.lr_scheduler, name)
    if name.startswith("_") or kind is torch.optim.lr_scheduler.SequentialLR:
        pytest.skip("made of others: see above")

    def made() -> tuple[torch.optim.Optimizer, object]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return optimizer, kind(optimizer, **options.get(name, {}))

    def rates(optimizer: torch.optim.Optimizer, scheduler: object) -> list[float]:
        found = []
        for _ in range(3):
            optimizer.step()
            scheduler.step()  # type: ignore[attr-defined]
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, scheduler = made()
    rates(optimizer, scheduler)
    other_optimizer, other = made()
    other.load_state_dict(_there_and_back(scheduler.state_dict()))  # type: ignore[attr-defined]
    other_optimizer.load_state_dict(optimizer.state_dict())
    assert rates(other_optimizer, other) == rates(optimizer, scheduler)


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


@pytest.mark.parametrize("says", [True, False])
def test_one_rank_answers_ctrl_c(capfd, says):
    """A terminal sends it to all ranks: there was a line of each."""
    signals = SaveSignals(["SIGINT"], says=says)
    try:
        signal.raise_signal(signal.SIGINT)
        assert signals.came == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signals.close()
    assert capfd.readouterr().err == says * "saving at the end of this step; Ctrl-C again ends at once\n"


FILES = Path("/proc/self/fd")


@pytest.mark.skipif(not FILES.is_dir(), reason="counts open files in /proc")
def test_closed_checkpoints_keep_no_file_open(tmp_path: Path) -> None:
    """Each kept its lock until the process ended, so a long training ran out of open files."""
    sw.init({"run_dir": "off"})
    try:
        sw.DistributedModel(torch.nn.Linear(2, 1))
        counts = []
        for number in range(4):
            checkpoints = sw.Checkpoints(tmp_path / str(number), asynchronous=False, signals=())
            checkpoints.save(number + 1)
            checkpoints.close()
            counts.append(len(os.listdir(FILES)))
        assert len(set(counts[1:])) == 1
    finally:
        sw.shutdown()
