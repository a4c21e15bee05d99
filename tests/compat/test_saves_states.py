"""States of model and optimizer: whole ones and parts, saved with one layout and loaded with others."""

from typing import Any

import pytest
import torch

from choices import in_every_run, in_sweep
from compat.saving import Net, Script, optimizer_of, plain
from shardwright.testing import run_ranks

ONE = {"partitions": 1}
TWO_STAGES = {"partitions": 2, "microbatches": 2}
TWO_REPLICAS = {"partitions": 1, "microbatches": 2}
FOUR = {"partitions": 2, "microbatches": 2}
OPTIMIZER_SHARED = {"partitions": 1, "shard_optimizer_state": True}
SHARED = {"partitions": 1, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}

LAYOUTS = {
    "one rank": (1, ONE),
    "two stages": (2, TWO_STAGES),
    "two replicas": (2, TWO_REPLICAS),
    "two stages of two replicas": (4, FOUR),
    "replicas share the optimizer's state": (2, OPTIMIZER_SHARED),
    "replicas share parameters": (2, SHARED),
}

# Before the first step of the run that loads, or after it: each layout in one of the two ways.
EACH = [(layout, number % 2 == 0) for number, layout in enumerate(LAYOUTS)]
FEW = [layout for layout in LAYOUTS if "two replicas" not in layout]


def trained(settings: dict[str, Any], kind: str) -> Any:
    script = Script(settings, kind=kind)
    script.train(3)
    return script.model.state_dict(), script.optimizer.state_dict()


@pytest.mark.parametrize("layout", in_every_run(LAYOUTS, FEW))
def test_a_full_state_is_that_of_a_plain_model_and_its_optimizer(layout: str) -> None:
    """It loads into a plain module and a plain optimizer of all of its parameters, and is what they hold."""
    num_ranks, settings = LAYOUTS[layout]
    for state, optimizer_state in run_ranks(trained, num_ranks, settings, "AdamW"):
        model = Net().double()
        model.load_state_dict(state)
        optimizer = optimizer_of(model.parameters(), "AdamW", {"lr": 1.0})
        optimizer.load_state_dict(optimizer_state)
        names = dict(model.named_parameters())
        assert len(optimizer.state) == len(names) - 1  # one is not trained
        for name, parameter in names.items():
            if parameter.requires_grad:
                assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape, name
                assert optimizer.state[parameter]["step"] == 3
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.1]
        assert {group["lr"] for group in optimizer.param_groups} == {0.005}


def resumed(settings: dict[str, Any], kind: str, state: Any, *, early: bool, partial: bool = False) -> Any:
    script = Script(settings, kind=kind)
    if not early:
        script.train(1)
    if partial:
        state = state[torch.distributed.get_rank()]
    result = script.model.load_state_dict(state[0])
    assert not result.missing_keys
    assert not result.unexpected_keys
    script.optimizer.load_state_dict(state[1])
    script.scheduler.load_state_dict(state[2])
    before = None if partial else plain(script.optimizer.state_dict())
    losses = script.train(3, begin=3)
    return losses, before


def first_half(settings: dict[str, Any], kind: str, *, partial: bool = False) -> Any:
    script = Script(settings, kind=kind)
    script.train(3)
    model, optimizer = script.model, script.optimizer
    state = (
        (model.local_state_dict(), optimizer.local_state_dict(gather_if_shard=False))
        if partial
        else (model.state_dict(), optimizer.state_dict())
    )
    saved = torch.utils._pytree.tree_map(
        lambda value: value.clone() if isinstance(value, torch.Tensor) else value,
        (*state, script.scheduler.state_dict()),
    )
    return saved, script.train(3)


@pytest.mark.parametrize(
    ("layout", "early"),
    [each if each[0] in FEW else in_sweep(*each) for each in EACH],
)
def test_training_goes_on_from_a_full_state(layout: str, early: bool) -> None:
    """Loaded before the first step or after it, the losses are the same to the last bit."""
    num_ranks, settings = LAYOUTS[layout]
    results = run_ranks(first_half, num_ranks, settings, "AdamW")
    state = results[0][0]
    for (_, expected), (found, before) in zip(
        results, run_ranks(resumed, num_ranks, settings, "AdamW", state, early=early), strict=True
    ):
        assert found == expected
        assert before["state"] == plain(state[1])["state"]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        in_sweep("two stages", "one rank"),
        ("two stages", "replicas share parameters"),
        ("replicas share parameters", "two stages"),
        *(in_sweep(layout, layout) for layout in ("two stages", "replicas share parameters")),
        in_sweep("replicas share parameters", "one rank"),
    ],
)
def test_a_full_state_goes_to_another_layout(source: str, target: str) -> None:
    num_ranks, settings = LAYOUTS[source]
    ((state, _), *_) = run_ranks(first_half, num_ranks, settings, "AdamW")
    num_ranks, settings = LAYOUTS[target]
    for _, before in run_ranks(resumed, num_ranks, settings, "AdamW", state, early=False):
        assert before["state"] == plain(state[1])["state"]


@pytest.mark.parametrize(
    ("layout", "early"),
    [(layout, not early) if layout in FEW else in_sweep(layout, not early) for layout, early in EACH],
)
def test_training_goes_on_from_the_parts_of_each_rank(layout: str, early: bool) -> None:
    num_ranks, settings = LAYOUTS[layout]
    results = run_ranks(first_half, num_ranks, settings, "AdamW", partial=True)
    parts = [part for part, _ in results]
    assert all(part[0].pop("_smp_is_partial") and part[1]["_smp_is_partial"] for part in parts)
    if settings["partitions"] == 2:
        assert all(len(part[0]) < len(Net().state_dict()) for part in parts)
    for part in parts:
        part[0]["_smp_is_partial"] = True
    again = run_ranks(resumed, num_ranks, settings, "AdamW", parts, early=early, partial=True)
    assert [found for found, _ in again] == [losses for _, losses in results]
