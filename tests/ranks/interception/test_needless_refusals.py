"""What was refused without need, or without a remedy: writes into lists, CTC losses, codebooks, Keras."""

import copy
from abc import ABC
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transparency import Case, Recipe, differences

import shardwright.torch as sw
from shardwright.testing import RanksFailedError, run_ranks

CASE = Case(config={"microbatches": 4, "profile": "estimated", "pipeline_parallel_degree": 2})
WIDTH = 8


def features(batch_size: int, length: int) -> Tensor:
    return torch.randn(batch_size, WIDTH, dtype=torch.float64)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def recipe(build: Callable[[], nn.Module], **changes: Any) -> Recipe:
    return Recipe(**{"build": build, "batch": features, "loss": squares, **changes})


class Heads(nn.Module):
    """Puts what each layer gives into a list that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), [None] * 4

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            self.heads[number] = x
        return torch.stack([head.square().mean() for head in self.heads])


class Keeps(nn.Module):
    """A unit that puts its result into a list of its own, or into one that all share."""

    def __init__(self, kept: list[Any], place: int):
        super().__init__()
        self.linear, self.kept, self.place = nn.Linear(WIDTH, WIDTH), kept, place

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        self.kept[self.place] = y
        return y


def keeps_together() -> nn.Module:
    shared: list[Any] = [None] * 4
    return nn.Sequential(*(Keeps(shared, place) for place in range(4)))


@pytest.mark.parametrize("build", [Heads, keeps_together])
def test_an_item_is_put_into_a_list(build):
    """It counted as a read of what the microbatch before had left there."""
    assert run_ranks(differences, 2, recipe(build), CASE) == [[], []]


class Speech(nn.Module):
    """Shortens sequences, and says how long they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = Half(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x, lengths = self.first(x, lengths)
        return self.last(self.middle(x).tanh()).log_softmax(-1), lengths


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x)[:, ::2], (lengths + 1) // 2


def utterances(batch_size: int, length: int) -> tuple[Tensor, ...]:
    x = torch.randn(batch_size, 12, WIDTH, dtype=torch.float64)
    return (
        x,
        torch.full((batch_size,), 12),
        torch.randint(1, 5, (batch_size, 3)),
        torch.full((batch_size,), 3),
    )


def connectionist(model: nn.Module, batch: Any) -> Tensor:
    x, lengths, y, y_lengths = batch
    z, lengths = model(x, lengths)
    return F.ctc_loss(z.transpose(0, 1), y, lengths, y_lengths)


class Spectra(nn.Module):
    """Filters a sound in its spectrum, between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        options = {"n_fft": 16, "hop_length": 4, "window": torch.hann_window(16, dtype=x.dtype)}
        for layer in self.layers:
            spectrum = torch.stft(x, **options, return_complex=True)
            mask = layer(spectrum.abs().transpose(1, 2)).transpose(1, 2)
            x = torch.istft(spectrum * mask, **options, length=x.shape[1])
        return x


def sounds(batch_size: int, length: int) -> Tensor:
    return torch.randn(batch_size, 64, dtype=torch.float64)


@pytest.mark.parametrize(
    "case",
    [
        recipe(Speech, batch=utterances, loss=connectionist),
        recipe(Spectra, batch=sounds),
    ],
    ids=["ctc loss with lengths of the model", "inverse Fourier transform"],
)
def test_operations_without_a_fake_kernel_whose_shape_is_known(case):
    """They were refused: the shape of the result were to depend on values."""
    assert run_ranks(differences, 2, case, CASE) == [[], []]


class _CalledOtherwise(nn.Module):
    """Has its own way of being called, which knows no hooks, and keeps its weights twice, as Keras does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.variables = [self.linear.weight, self.linear.bias]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, *self.variables).tanh()


# As of a library of its own.
_CalledOtherwise.__module__ = "layers"


class Unregistered(nn.Module):
    """Keeps its layers where PyTorch does not see them."""

    def __init__(self) -> None:
        super().__init__()
        layers = [_CalledOtherwise() for _ in range(3)]
        self.weights = nn.ParameterList(weight for layer in layers for weight in layer.variables)
        self.layers = (layers,)

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers[0]:
            x = layer(x)
        return x


Unregistered.__module__ = "layers"


def trained(build: Callable[[], nn.Module]) -> None:
    sw.init({"run_dir": "off", **CASE.config})
    torch.manual_seed(0)
    network = build().double()
    plain = copy.deepcopy(network)
    model = sw.DistributedModel(network)

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = squares(model, x)
        model.backward(loss)
        return loss

    x = torch.randn(8, WIDTH, dtype=torch.float64)
    loss = train(model, x).reduce_mean()
    expected = torch.stack([squares(plain, part) for part in x.chunk(4)]).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    known = dict(plain.named_parameters())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, known[name].grad)
    assert 0 < len(list(model.local_parameters())) < len(known)


def test_layers_with_a_call_of_their_own():
    """Layers of Keras are called past the hooks of PyTorch: "calls no module"; gradients had no data."""
    run_ranks(trained, 2, lambda: nn.Sequential(*(_CalledOtherwise() for _ in range(4))))


def adapted(model: Any, x: Tensor) -> Tensor:
    """The loss of a model that has learned from its task: MAML."""
    network = getattr(model, "module", model)
    weights = dict(network.named_parameters())
    loss = functional_call(network, weights, (x,)).square().mean()
    gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    fast = {name: weights[name] - 0.1 * grad for name, grad in zip(weights, gradients, strict=True)}
    return functional_call(network, fast, (x,)).square().mean()


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def test_a_model_called_with_weights_that_are_computed():
    """The error said that the loss depended on no weight that is trained."""
    with pytest.raises(RanksFailedError, match=r"uses torch\.func\.functional_call around the model"):
        run_ranks(differences, 2, recipe(layers, loss=adapted), CASE)
    replicas = Case(config={"microbatches": 2, "pipeline_parallel_degree": 1, "data_parallel_degree": 2})
    assert run_ranks(differences, 2, recipe(layers, loss=adapted), replicas) == [[], []]


Kind = TypeVar("Kind")


class Abstractly(ABC, nn.Module):
    """Behind such a base, an instance could not change its class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh()


class Generally(Generic[Kind], nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [(Abstractly, "none"), (Generally, "full")],
)
def test_units_behind_abstract_and_generic_bases(kind, recompute):
    """They ended in `__class__ assignment: object layout differs`."""

    def build() -> nn.Module:
        return nn.Sequential(*(kind() for _ in range(4)))

    case = replace(CASE, config={**CASE.config, "activation_checkpointing": recompute})
    assert run_ranks(differences, 2, recipe(build), case) == [[], []]
