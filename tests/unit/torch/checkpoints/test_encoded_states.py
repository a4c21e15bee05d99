"""States as JSON: everything comes back, or is refused by the place where it is."""

import json
import random
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import SequentialLR

from shardwright.errors import CheckpointError, CorruptCheckpointError
from shardwright.torch.checkpoints.encoded import decode, encode

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
