"""A loop that keeps gradients between batches is told where the plan's memory does not suffice."""

import logging

import pytest
import torch
from planned import planned
from torch import nn

from shardwright.torch.execution.kept_gradients import KeptGradients


def with_limit(spare_bytes, *, gradients_bytes=0):
    plan = planned()
    prediction = plan.prediction
    memory = prediction.memory[0].model_copy(update={"gradients_bytes": gradients_bytes})
    limit = memory.peak_bytes + spare_bytes
    conditions = prediction.conditions.model_copy(update={"memory_limit_bytes": limit})
    changed = {"memory": (memory, *prediction.memory[1:]), "conditions": conditions}
    return plan.model_copy(update={"prediction": prediction.model_copy(update=changed)})


def with_gradients(num_bytes):
    parameter = nn.Parameter(torch.zeros(num_bytes // 4))
    parameter.grad = torch.zeros_like(parameter)
    return [parameter, nn.Parameter(torch.zeros(3))]


def looked(caplog, plan, parameters, times=1):
    watch = KeptGradients()
    with caplog.at_level(logging.WARNING, logger="shardwright"):
        for _ in range(times):
            watch.look(parameters, plan, 0)
    return caplog.messages


def test_gradients_for_which_there_is_no_room(caplog):
    (told,) = looked(caplog, with_limit(1000), with_gradients(4000), times=3)
    assert "the plan counts on their 3.9 KiB" in told
    assert "set_to_none=False" in told


@pytest.mark.parametrize(
    ("spare_bytes", "planned_bytes", "kept_bytes"),
    [(4000, 0, 4000), (1000, 3000, 4000), (0, 0, 0)],
    ids=["there is room", "they are planned", "none"],
)
def test_what_fits_is_not_told(caplog, spare_bytes, planned_bytes, kept_bytes):
    parameters = with_gradients(kept_bytes) if kept_bytes else [nn.Parameter(torch.zeros(3))]
    assert looked(caplog, with_limit(spare_bytes, gradients_bytes=planned_bytes), parameters) == []


class Shared(torch.Tensor):
    """As a gradient that replicas share: this rank has some rows."""

    local = torch.zeros(100)


def test_of_shared_gradients_the_rows_of_this_rank_count(caplog):
    (parameter, *_) = with_gradients(4000)
    parameter.grad = parameter.grad.as_subclass(Shared)
    (told,) = looked(caplog, with_limit(0), [parameter])
    assert "the plan counts on their 400 B" in told


def test_sparse_gradients_are_small(caplog):
    (parameter, *_) = with_gradients(4000)
    parameter.grad = parameter.grad.to_sparse()
    assert looked(caplog, with_limit(0), [parameter]) == []


def test_later_steps_are_not_looked_at(caplog):
    watch = KeptGradients()
    for _ in range(3):
        watch.look([nn.Parameter(torch.zeros(3))], with_limit(0), 0)
    with caplog.at_level(logging.WARNING, logger="shardwright"):
        watch.look(with_gradients(4000), with_limit(0), 0)
    assert caplog.messages == []
