"""A spread model is called outside of step functions, without gradients, as in one process."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.testing import run_ranks

D = torch.float64
KINDS: dict[str, dict[str, Any]] = {
    "stages": {},
    "parts of layers": {"tensor_parallel_degree": 2},
    "interleaved": {"pipeline": "interleaved"},
}


class Recurrent(nn.Module):
    """Returns what has no row for each sample: a state with the samples in its second axis, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cells = nn.Embedding(20, 8), nn.LSTM(8, 8, 2)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 20)

    def forward(self, ids: Tensor, state: Any = None, *, scale: float = 1.0) -> dict[str, Any]:
        h, state = self.cells(self.embedding(ids), state)
        logits = self.head(self.norm(h.flatten(0, 1))) * scale
        return {"logits": logits, "state": state, "size": logits.square().mean(), "of": "words"}


def _train(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x)["logits"].square().mean()
    model.backward(loss)
    return loss


def _evaluations(model: Any) -> list[Any]:
    """Batches of several sizes, the state of one given to the next."""
    torch.manual_seed(1)
    told, state = [], None
    for rows in (7, 7, 3, 1):
        made = model(torch.randint(20, (rows, 5)), state, scale=0.5)
        state = made["state"]
        told.append(made)
    return told


def _compare(kind: str, inference: bool, before_the_first_step: bool = False) -> float:
    sw.init({"profile": "estimated", "run_dir": "off", "microbatches": 4, **KINDS[kind]})
    torch.manual_seed(0)
    net = Recurrent().to(D)
    plain = copy.deepcopy(net).eval()
    model = sw.DistributedModel(net)
    model.eval()
    with torch.inference_mode() if inference else torch.no_grad():
        before = _evaluations(model) if before_the_first_step else []
    sw.step(_train)(model, torch.randint(20, (8, 5)))
    with torch.inference_mode() if inference else torch.no_grad():
        ours, expected = _evaluations(model), _evaluations(plain)
        ours, expected = [*before, *ours], [*expected[: len(before)], *expected]
        assert all(each["of"] == "words" for each in ours)
        pairs = [
            (a, b)
            for mine, theirs in zip(ours, expected, strict=True)
            for a, b in (
                (mine["logits"], theirs["logits"]),
                (mine["size"], theirs["size"]),
                *zip(mine["state"], theirs["state"], strict=True),
            )
        ]
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize(("kind", "inference"), [*((kind, False) for kind in KINDS), ("stages", True)])
def test_is_as_in_one_process(kind: str, inference: bool) -> None:
    assert max(run_ranks(_compare, 2, kind, inference)) < 1e-12


@pytest.mark.parametrize("kind", ["stages", "parts of layers"])
def test_is_as_in_one_process_before_the_first_step(kind: str) -> None:
    """An evaluation before the training was refused; a script that plays games begins with it."""
    assert max(run_ranks(_compare, 2, kind, False, True)) < 1e-12


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("shift", torch.ones(8))

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z).tanh() + self.shift

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encoder(x))


def _samples(settings: dict[str, Any]) -> tuple[str, float]:
    sw.init({"profile": "estimated", "run_dir": "off", "microbatches": 2, **settings})
    torch.manual_seed(0)
    model = sw.DistributedModel(Autoencoder())
    sw.step(lambda model, x: model.backward(model(x).square().mean()))(model, torch.ones(4, 8))
    plain = Autoencoder()
    plain.load_state_dict(model.state_dict())
    z = torch.randn(3, 4)
    with pytest.raises(AttributeError) as error:
        model.decode(z)
    with torch.no_grad(), model.gathered(model):
        made = model.module.decode(z)
        saved = {name: value.clone() for name, value in model.module.state_dict().items()}
    plain.load_state_dict(saved)
    return str(error.value), (made - plain.decode(z)).abs().max().item()


@pytest.mark.parametrize(
    "settings",
    [{}, {"tensor_parallel_degree": 2}, {"sharded_data_parallel_degree": 2, "pipeline_parallel_degree": 1}],
)
def test_a_method_of_the_model_has_all_weights_in_gathered(settings: dict[str, Any]) -> None:
    """``model.decode(z)``, for samples of an autoencoder: the advice led to the weights of one rank."""
    for told, difference in run_ranks(_samples, 2, settings):
        assert "model.module.decode" in told
        assert "model.gathered(model):` around it" in told
        assert difference < 1e-6


def _batches_of_two_ranks() -> list[float]:
    sw.init({"profile": "estimated", "run_dir": "off", "microbatches": 2})
    torch.manual_seed(0)
    model = sw.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
    x = torch.full((4, 4), 1.0 + sw.rank())
    with torch.no_grad():
        before = model(x).sum().item()
    sw.step(lambda model, x: model.backward(model(x).mean()))(model, x)
    with torch.no_grad():
        return [before, model(x).sum().item()]


def test_all_ranks_work_on_the_first_ones_batch_before_and_after_the_first_step() -> None:
    first, second = run_ranks(_batches_of_two_ranks, 2)
    assert first == second
    assert first[0] == pytest.approx(first[1], rel=1e-6)


def _refused() -> list[str]:
    sw.init({"profile": "estimated", "run_dir": "off", "microbatches": 2})
    with torch.device("meta"):
        net = Recurrent()
    model = sw.DistributedModel(net)
    x, told = torch.randint(20, (4, 5)), []
    for grad in (False, True):
        with torch.set_grad_enabled(grad), pytest.raises(UsageError) as error:
            model(x)
        told.append(str(error.value))
    return told


def test_refuses_what_is_no_evaluation() -> None:
    for before, training in run_ranks(_refused, 2):
        assert "after the first training step" in before
        assert "under torch.no_grad(), on all ranks" in training
