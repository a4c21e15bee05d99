"""Replicas share parts of layers by rows, too: losses, gradients and parameters are those of one process."""

from typing import Any

import pytest
import torch
from sharded import on_hosts
from test_shared_layers import CHANGING, RECOMPUTED, SCHEDULES, adamw, case, check, language
from torch import Tensor, nn
from transparency import Case, Recipe, differences_by_case

from choices import in_sweep, thorough
from shardwright.testing import run_ranks

SHARDED = {"sdp_param_persistence_threshold": 20, "pipeline_parallel_degree": 1}
DEGREE_2 = {**SHARDED, "sharded_data_parallel_degree": 2}
OPTIMIZER_STATE = {**SHARDED, "shard_optimizer_state": True}
THREE_AXES = {**DEGREE_2, "pipeline_parallel_degree": 2, "microbatches": 4}


def clip_norm(model: Any) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_values(model: Any) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


@pytest.mark.parametrize(
    "more", [{}, thorough({"memory_limit": 330_000})], ids=["whole", "in every microbatch"]
)
def test_rows_of_parts(more):
    check(language(), {"three steps": case(2, {**DEGREE_2, **more}, clip=clip_norm)}, num_ranks=4)


@pytest.mark.sweep
def test_some_parts_are_whole_on_replicas():
    """Lists of gradients have shared rows, parts and ordinary tensors side by side."""
    settings = {**DEGREE_2, "sdp_param_persistence_threshold": 1500}
    cases = {
        "values": case(2, {**settings, **RECOMPUTED}, clip=clip_values, iterations=CHANGING),
        "by the optimizer's state": case(2, {**settings, "shard_optimizer_state": True}, clip=clip_values),
    }
    check(language(), cases, num_ranks=4)


@pytest.mark.thorough
def test_optimizer_state_of_parts():
    cases = {"three steps": case(2, OPTIMIZER_STATE, clip=clip_norm, optimizer_first=True)}
    check(language(tied=True, dropout=0.1), cases, num_ranks=4)


@pytest.mark.parametrize("kind", [thorough("1f1b"), in_sweep("zb_v"), in_sweep("interleaved_1f1b")])
def test_stages_of_rows_of_parts(kind):
    """Eight ranks: two stages, each shared by rows and by layers."""
    settings = {**THREE_AXES, **SCHEDULES[kind]}
    check(
        language(tied=True, dropout=0.1),
        {"other shapes": case(2, settings, iterations=CHANGING, clip=clip_norm)},
        num_ranks=8,
    )


def differences_on_hosts(recipe: Recipe, cases: dict[str, Case], ranks_per_host: int) -> dict[str, list[str]]:
    on_hosts(ranks_per_host)
    return differences_by_case(recipe, cases)


@pytest.mark.parametrize(
    ("ranks_per_host", "more"), [in_sweep(2, {}), in_sweep(1, {"ddp_dist_backend": "gloo"})]
)
def test_rows_of_parts_on_other_hosts(ranks_per_host, more):
    cases = {
        "three steps": case(2, {**DEGREE_2, **more}, clip=clip_norm),
        "other shapes": case(2, {**DEGREE_2, **RECOMPUTED, **more}, iterations=CHANGING),
    }
    found = run_ranks(differences_on_hosts, 4, language(), cases, ranks_per_host, timeout_s=200)
    assert found == [{}] * 4


def trained(settings: dict[str, Any]):
    """Makes a step, so that all forms and states are there."""
    import shardwright.torch as sw

    recipe = language()
    sw.init({"run_dir": "off", "profile": "estimated", "microbatches": 2, **settings})
    torch.manual_seed(0)
    plain = recipe.build().double()
    model = sw.DistributedModel(plain)
    optimizer = sw.DistributedOptimizer(adamw(model))

    @sw.step
    def train(model, batch):
        loss = recipe.loss(model, batch)
        model.backward(loss)
        return loss

    torch.manual_seed(1)
    batch = recipe.batch(4, 12)

    def step() -> float:
        optimizer.zero_grad()
        loss = train(model, batch).reduce_mean().item()
        optimizer.step()
        return loss

    step()
    return sw, model, optimizer, step


def states(settings: dict[str, Any]):
    _, model, optimizer, step = trained(settings)
    saved = model.state_dict()
    own = optimizer.state_dict()
    kinds = {type(value) for value in saved.values()}
    first = step()
    model.load_state_dict(saved)
    optimizer.load_state_dict(own)
    again = model.state_dict()
    same = all(torch.equal(saved[name], value) for name, value in again.items())
    return kinds, {name: tuple(value.shape) for name, value in saved.items()}, first, step(), same


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [DEGREE_2, in_sweep(OPTIMIZER_STATE)], ids=["rows", "state"])
def test_states_are_whole_and_are_loaded(settings):
    expected = {name: tuple(value.shape) for name, value in language().build().state_dict().items()}
    for kinds, shapes, first, second, same in run_ranks(states, 4, {**settings, "tensor_parallel_degree": 2}):
        assert kinds == {Tensor}
        assert shapes == expected
        assert same
        assert second == pytest.approx(first, rel=1e-12)


def test_rows_of_parts_that_would_come_and_go_are_refused():
    def on_rank(settings):
        from shardwright.errors import UsageError

        on_hosts(2)
        with pytest.raises(UsageError, match="rows of parts of layers cannot come and go") as caught:
            trained(settings)
        return str(caught.value)

    settings = {**DEGREE_2, "tensor_parallel_degree": 2, "sdp_max_live_parameters": 1000}
    for text in run_ranks(on_rank, 4, settings):
        assert "sdp_max_live_parameters is 1000, this rank computes with" in text
