"""Replicas share parts of layers by rows, too: losses, gradients and parameters are those of one process.

Models without memory whose layers ranks share: each rank makes its part of the values of one process.
"""

import copy
from typing import Any

import pytest
import torch
from sharded import on_hosts
from test_shared_layers import (
    CHANGING,
    RECOMPUTED,
    SCHEDULES,
    LanguageModel,
    Layer,
    adamw,
    case,
    check,
    language,
)
from torch import Tensor, nn
from transparency import Case, Recipe, differences_by_case

import shardwright.torch as sw
from choices import thorough
from shardwright.errors import UsageError
from shardwright.testing import run_ranks
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor

SHARDED = {"sdp_param_persistence_threshold": 20, "pipeline_parallel_degree": 1}
DEGREE_2 = {**SHARDED, "sharded_data_parallel_degree": 2}
OPTIMIZER_STATE = {**SHARDED, "shard_optimizer_state": True}
THREE_AXES = {**DEGREE_2, "pipeline_parallel_degree": 2, "microbatches": 4}


def clip_norm(model: Any) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.parametrize(
    "more", [{}, thorough({"memory_limit": 330_000})], ids=["whole", "in every microbatch"]
)
def test_rows_of_parts(more):
    check(language(), {"three steps": case(2, {**DEGREE_2, **more}, clip=clip_norm)}, num_ranks=4)


@pytest.mark.thorough
def test_optimizer_state_of_parts():
    cases = {"three steps": case(2, OPTIMIZER_STATE, clip=clip_norm, optimizer_first=True)}
    check(language(tied=True, dropout=0.1), cases, num_ranks=4)


@pytest.mark.thorough
def test_stages_of_rows_of_parts():
    """Eight ranks: two stages, each shared by rows and by layers."""
    settings = {**THREE_AXES, **SCHEDULES["1f1b"]}
    check(
        language(tied=True, dropout=0.1),
        {"other shapes": case(2, settings, iterations=CHANGING, clip=clip_norm)},
        num_ranks=8,
    )


def differences_on_hosts(recipe: Recipe, cases: dict[str, Case], ranks_per_host: int) -> dict[str, list[str]]:
    on_hosts(ranks_per_host)
    return differences_by_case(recipe, cases)


@pytest.mark.thorough
def test_rows_of_parts_on_other_hosts():
    cases = {"other shapes": case(2, {**DEGREE_2, **RECOMPUTED}, iterations=CHANGING)}
    assert run_ranks(differences_on_hosts, 4, language(), cases, 2, timeout_s=200) == [{}] * 4


def trained(settings: dict[str, Any]):
    """Makes a step, so that all forms and states are there."""
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
def test_states_are_whole_and_are_loaded():
    expected = {name: tuple(value.shape) for name, value in language().build().state_dict().items()}
    for kinds, shapes, first, second, same in run_ranks(states, 4, {**DEGREE_2, "tensor_parallel_degree": 2}):
        assert kinds == {Tensor}
        assert shapes == expected
        assert same
        assert second == pytest.approx(first, rel=1e-12)


def test_rows_of_parts_that_would_come_and_go_are_refused():
    def on_rank(settings):
        on_hosts(2)
        with pytest.raises(UsageError, match="rows of parts of layers cannot come and go") as caught:
            trained(settings)
        return str(caught.value)

    settings = {**DEGREE_2, "tensor_parallel_degree": 2, "sdp_max_live_parameters": 1000}
    for text in run_ranks(on_rank, 4, settings):
        assert "sdp_max_live_parameters is 1000, this rank computes with" in text


QUIET = {"run_dir": "off", "profile": "estimated", "microbatches": 2, "seed": 3}


class Model(LanguageModel):
    """Its layers redraw a weight that was drawn before, as those of GPT-2 do, and write through `data`."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias) if module.bias is not None else None
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
        elif isinstance(module, Layer):
            module.down.weight.data.normal_(mean=0.0, std=0.01)
        elif module is self:
            for layer in self.modules():
                if isinstance(layer, Layer):
                    nn.init.trunc_normal_(layer.up.weight, std=0.03)


def build(built: str) -> nn.Module:
    torch.manual_seed(4)
    torch.set_default_dtype(torch.float64)
    try:
        if built == "meta":
            with torch.device("meta"):
                return Model()
        with sw.delay_param_initialization(enabled=built == "delayed"):
            return Model()
    finally:
        torch.set_default_dtype(torch.float32)


def training(settings: dict[str, Any], built: str, *, state: dict[str, Any] | None = None) -> Any:
    """Losses of two steps of AdamW, the first values, the last ones, and how many parameters are divided."""
    sw.init({**QUIET, **settings})
    model = sw.DistributedModel(build(built))
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    first: dict[str, Tensor] = {}
    model.register_post_partition_hook(lambda model, _: first.update(copy.deepcopy(model.state_dict())))
    if state is not None:
        result = model.load_state_dict(state)
        assert not result.missing_keys
        assert not result.unexpected_keys

    recipe = language()

    @sw.step
    def train(model: Any, batch: dict[str, Tensor]) -> Tensor:
        loss = recipe.loss(model, batch)
        model.backward(loss)
        return loss

    losses = []
    for number in range(2):
        torch.manual_seed(number)
        optimizer.zero_grad()
        losses.append(train(model, recipe.batch(4, 8)).reduce_mean().item())
        optimizer.step()
    divided = sum(isinstance(p, DividedTensor) for p in model.local_parameters())
    return losses, first, model.state_dict(), divided


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "layers": (2, {"tensor_parallel_degree": 2}),
    "stages": (4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
}


@pytest.mark.parametrize(
    ("layout", "built"),
    [("layers", "delayed"), thorough("stages", "meta")],
)
def test_values_are_those_of_one_process(layout: str, built: str) -> None:
    ranks, settings = LAYOUTS[layout]
    ((losses, first, last, _),) = run_ranks(training, 1, {}, built)
    found = run_ranks(training, ranks, settings, built)
    assert max(divided for *_, divided in found) > 4
    for own_losses, own_first, own_last, _ in found:
        assert own_losses == pytest.approx(losses, rel=1e-12)
        assert own_first.keys() == first.keys() == own_last.keys()
        for name, value in first.items():
            assert torch.equal(own_first[name], value), name
            torch.testing.assert_close(own_last[name], last[name], rtol=1e-7, atol=1e-9)


def test_a_state_waits_for_the_parts() -> None:
    torch.manual_seed(9)
    state = Model().double().state_dict()
    settings = {"tensor_parallel_degree": 2}
    ((losses, _, last, _),) = run_ranks(training, 1, {}, "ordinary", state=state)
    for own_losses, first, own_last, divided in run_ranks(training, 2, settings, "meta", state=state):
        assert divided > 4
        assert all(torch.equal(first[name], value) for name, value in state.items())
        assert own_losses == pytest.approx(losses, rel=1e-12)
        for name, value in last.items():
            torch.testing.assert_close(own_last[name], value, rtol=1e-7, atol=1e-9)
