"""States of models and optimizers whose layers ranks share: whole ones of any run, and parts of a rank."""

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_shared_layers import LanguageModel, language
from torch import Tensor

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.testing import run_ranks
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, local_of

QUIET = {"run_dir": "off", "profile": "estimated", "microbatches": 2}
TENSOR = {"tensor_parallel_degree": 2}
SPREAD = {**TENSOR, "pipeline_parallel_degree": 2}


class Run:
    """A model, its optimizer, and steps on batches that follow from their numbers."""

    def __init__(self, settings: dict[str, Any], *, seed: int = 0, optimizer_state: Any = None):
        sw.init({**QUIET, **settings})
        torch.manual_seed(seed)
        net = LanguageModel(tied=True).double()
        self.recipe = language()
        self.optimizer = sw.DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=1e-2))
        if optimizer_state is not None:
            self.optimizer.load_state_dict(optimizer_state)
        self.model = sw.DistributedModel(net)
        self.step = sw.step(self._step)

    def _step(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        loss = self.recipe.loss(model, batch)
        model.backward(loss)
        return loss

    def train(self, first: int, until: int) -> list[float]:
        losses = []
        for number in range(first, until):
            torch.manual_seed(number)
            self.optimizer.zero_grad()
            losses.append(self.step(self.model, self.recipe.batch(4, 8)).reduce_mean().item())
            self.optimizer.step()
        return losses


def saved_by_one_process() -> tuple[bytes, list[float], dict[str, Tensor]]:
    """States after two steps; losses of the next two, and what the model is then."""
    run = Run({})
    run.train(0, 2)
    file = io.BytesIO()
    torch.save((run.model.state_dict(), run.optimizer.state_dict()), file)
    return file.getvalue(), run.train(2, 4), run.model.state_dict()


def goes_on(settings: dict[str, Any], content: bytes, when: str) -> tuple[list[float], dict[str, Tensor]]:
    model_state, optimizer_state = torch.load(io.BytesIO(content))
    first = optimizer_state if when == "before wrapping" else None
    run = Run(settings, seed=7, optimizer_state=first)
    if when == "after a step":
        run.train(0, 1)
    result = run.model.load_state_dict(model_state)
    assert not result.missing_keys
    assert not result.unexpected_keys
    if first is None:
        run.optimizer.load_state_dict(optimizer_state)
    losses = run.train(2, 4)
    for parameter, values in run.optimizer.state.items():
        assert type(values["exp_avg"]) is type(values["exp_avg_sq"]) is type(parameter.detach())
    return losses, run.model.state_dict()


WAYS = [(2, TENSOR, "after wrapping"), (4, SPREAD, "after a step")]


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "settings", "when"), WAYS)
def test_whole_states_go_on(ranks: int, settings: dict[str, Any], when: str) -> None:
    """Moments are divided like their parameters from then on."""
    ((content, losses, last),) = run_ranks(saved_by_one_process, 1)
    for own_losses, own_last in run_ranks(goes_on, ranks, settings, content, when):
        assert own_losses == pytest.approx(losses, rel=1e-11)
        for name, value in last.items():
            torch.testing.assert_close(own_last[name], value, rtol=1e-7, atol=1e-9)


def loaded(settings: dict[str, Any], *, trained: bool) -> list[str]:
    """Loads states that are whole, partial or do not fit; names of tensors that are not as expected."""
    run = Run(settings)
    if trained:
        run.train(0, 1)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    torch.manual_seed(11)
    state = LanguageModel(tied=True).double().state_dict()
    some = {name: value for name, value in state.items() if ".up." in name or name.endswith("qkv.weight")}
    result = run.model.load_state_dict(some, strict=False)
    assert set(result.missing_keys) == state.keys() - some.keys()
    found = run.model.state_dict()
    wrong = [name for name in state if not torch.equal(found[name], some.get(name, before[name]))]
    less, more = dict(state), {**state, "other": torch.zeros(2)}
    del less["layers.0.up.weight"]
    turned = {**state, "layers.0.up.weight": state["layers.0.up.weight"].t()}
    for other, text in (
        (less, r"Missing key.*layers\.0\.up\.weight"),
        (more, "Unexpected key.*other"),
        (turned, r"size mismatch for layers\.0\.up\.weight"),
    ):
        with pytest.raises(RuntimeError, match=f"(?s){text}"):
            run.model.load_state_dict(other)
    run.model.load_state_dict(state)
    found = run.model.state_dict()
    return wrong + [name for name in state if not torch.equal(found[name], state[name])]


@pytest.mark.parametrize("trained", [False, True])
def test_states_of_models_are_loaded_as_by_a_plain_one(trained: bool) -> None:
    assert run_ranks(loaded, 2, TENSOR, trained=trained) == [[]] * 2


def parts_of_ranks() -> dict[str, Any]:
    """Saves the state of an optimizer on each rank, and loads it again."""
    run = Run(TENSOR)
    run.train(0, 2)
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()))
    shapes = {}
    names = dict(run.model.module.named_parameters())
    for number, name in enumerate(state["parameter_names"]):
        kept = state["state"][number]["exp_avg"]
        assert type(kept) is torch.Tensor
        assert kept.shape == local_of(names[name]).shape
        shapes[name] = isinstance(names[name], DividedTensor)
    expected = run.train(2, 3)
    with torch.no_grad():
        for values in run.optimizer.state.values():
            values["exp_avg"].zero_()
    run.optimizer.load_state_dict(state)
    files: list[Any] = [None, None]
    dist.all_gather_object(files, file.getvalue())
    other = torch.load(io.BytesIO(files[1 - dist.get_rank()]))
    with pytest.raises(UsageError) as caught:
        run.optimizer.load_state_dict(other)
    with pytest.raises(UsageError, match=r"cannot be pickled.*model\.state_dict"):
        torch.save(run.model.module.state_dict(), io.BytesIO())
    return {"divided": sum(shapes.values()), "text": str(caught.value), "losses": expected}


def test_each_rank_saves_its_parts_of_moments() -> None:
    for rank, found in enumerate(run_ranks(parts_of_ranks, 2)):
        assert found["divided"] > 8
        assert f"has the parts of rank {1 - rank} of 2 ranks that share layers" in found["text"]


def test_parts_of_another_degree_are_refused() -> None:
    def save() -> dict[str, Any]:
        run = Run(TENSOR)
        run.train(0, 1)
        return run.optimizer.state_dict()

    def load(state: dict[str, Any]) -> str:
        run = Run({})
        with pytest.raises(UsageError) as caught:
            run.optimizer.load_state_dict(state)
        return str(caught.value)

    state = run_ranks(save, 2)[0]
    (text,) = run_ranks(load, 1, state)
    assert "rank 0 of 2 ranks that share layers, and this is rank 0 of 1" in text
    assert "sw.Checkpoints" in text
