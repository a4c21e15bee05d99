"""Replicas that train on the same samples are told so, once.

The digest of what optimizers update with changes whenever a number does.

The loss scale falls with overflows and grows without.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardwright.errors import UsageError
from shardwright.mesh import Mesh
from shardwright.torch.loss_scale import LossScaler
from shardwright.torch.step_end.group_numbers import GroupNumbers
from shardwright.torch.step_end.training_alike import SameSamples, SameStream

# The second rank of a pipeline may load anything.
SAME = [2.5, 1.0, 2.5, 1.1]
OTHERS = [2.5, 0.0, 2.4, 0.0]
TWO_REPLICAS = Mesh.of(world_size=4, pipeline=2, data=2)


@pytest.fixture
def told(caplog):
    """What is said of the batches of some steps."""

    def run(*steps: list[float], rank: int = 0, mesh: Mesh = TWO_REPLICAS) -> list[str]:
        caplog.clear()
        same = SameSamples(SimpleNamespace(mesh=mesh, rank=rank))  # type: ignore[arg-type]
        for digests in steps:
            assert same.look(digests, step=1) is None
        return [record.getMessage() for record in caplog.records]

    return run


def test_equal_samples_in_the_first_steps(told):
    (text,) = told(SAME, SAME, SAME)
    assert "all 2 replicas had the same samples in the first 2 steps" in text
    assert not told(SAME, SAME, rank=1)


@pytest.mark.parametrize(
    "steps", [[OTHERS, SAME, SAME], [SAME, OTHERS, SAME], [SAME], [[0.0] * 4] * 3], ids=str
)
def test_other_samples(told, steps):
    assert not told(*steps)


def test_one_replica(told):
    assert not told([2.5, 2.5], [2.5, 2.5], mesh=Mesh.of(world_size=2, pipeline=2))


@pytest.mark.parametrize(
    ("digests", "says"),
    [
        ([3.0, 8.0, 3.0, 9.0], False),
        ([3.0, 0.0, 0.0, 0.0], False),  # only one reads a stream
        ([3.0, 3.0, 4.0, 4.0], True),
    ],
)
def test_replicas_that_read_other_streams(digests, says, caplog):
    """A shuffle without a seed lost samples, and trained others twice."""
    SameStream(SimpleNamespace(mesh=TWO_REPLICAS, rank=0)).look(digests, step=1)  # type: ignore[arg-type]
    text = "in step 1, rank 2 had read other samples than rank 0"
    assert [text in record.getMessage() for record in caplog.records] == [True] * says


def test_every_change_of_a_number_is_another_digest():
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(2))], lr=0.1)
    context = SimpleNamespace(optimizers=[SimpleNamespace(optimizer=optimizer)], device=torch.device("cpu"))
    numbers, group = GroupNumbers(context), optimizer.param_groups[0]  # type: ignore[arg-type]
    moving, listed = torch.tensor(0.9), [0.5, 0.6]
    changes = [
        lambda: None,
        lambda: group.update(lr=0.2),
        lambda: group.update(betas=(moving, 0.99)),
        lambda: moving.fill_(0.8),  # in a tuple that stays the same
        lambda: group.update(further=listed),
        lambda: listed.append(0.7),
        lambda: group.update(weight_decay=0.1),
        lambda: numbers.note(optimizer),
    ]
    found = []
    for change in changes:
        change()
        assert numbers.digests() == numbers.digests()
        found.append(numbers.digests()[:2])
    assert len(set(found)) == len(changes)


def scales(overflows, **settings):
    scaler = LossScaler(**settings)
    found = []
    for overflow in overflows:
        scaler.gradients_came(overflow=overflow)
        assert scaler.begin_update() is not overflow
        assert scaler.begin_update() is not overflow  # a second optimizer changes nothing
        found.append(scaler.scale)
    return found


def test_it_falls_at_once_and_grows_after_a_window():
    overflows = [True, False, False, True, False, False]
    assert scales(overflows, scale=8.0, scale_window=2) == [4, 4, 8, 4, 4, 8]


def test_several_overflows_until_it_falls():
    assert scales([True, True, True], scale=8.0, delayed_shift=2) == [8, 4, 2]
    forgets = {"scale": 8.0, "delayed_shift": 2, "consecutive_hysteresis": True}
    assert scales([True, False, True, True], **forgets) == [8, 8, 8, 4]
    assert scales([True, False, True], scale=8.0, delayed_shift=2) == [8, 8, 4]


def test_an_overflow_counts_until_the_update_that_its_gradients_are_added_up_for():
    scaler = LossScaler(scale=8.0)
    scaler.gradients_came(overflow=True)
    scaler.gradients_came(overflow=False)
    assert not scaler.begin_update()
    scaler.gradients_came(overflow=False)
    assert scaler.begin_update()


@pytest.mark.parametrize("settings", [{"scale": 0.0}, {"scale_factor": 1.0}, {"min_scale": -1.0}])
def test_scales_that_cannot_work(settings):
    with pytest.raises(UsageError, match="cannot work"):
        LossScaler(**settings)
