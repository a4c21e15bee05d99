"""Models whose parameters are divided give the loss and the gradients of the plain ones."""

import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from language_models import MODELS, all_in_64_bits, build
from test_shared_layers import case, check
from torch import nn
from transparency import Recipe

from choices import thorough
from shardwright.placement import Cut
from shardwright.testing import run_ranks
from shardwright.torch.tensor_parallel.divide import divide, settle_gradients, tensor_group
from shardwright.torch.tensor_parallel.divided_tensor import local_of, whole


def alternating(model, num_ranks):
    """Rows of one matrix, columns of the next: half of every matrix for each of two ranks."""
    matrices = [(name, each) for name, each in model.named_parameters() if each.dim() >= 2]
    return {
        name: Cut.even(index % 2, each.shape[index % 2], num_ranks=num_ranks)
        for index, (name, each) in enumerate(matrices)
    }


def at_random(model, num_ranks):
    """Any dimension, in runs of any length."""
    draw = random.Random(num_ranks)
    found = {}
    for name, each in model.named_parameters():
        if draw.random() < 0.2 or not each.dim():
            continue
        dim = draw.randrange(each.dim())
        bounds = sorted(draw.randint(0, each.shape[dim]) for _ in range(draw.randint(1, 4)))
        lengths = [b - a for a, b in zip([0, *bounds], [*bounds, each.shape[dim]], strict=True)]
        found[name] = Cut.of(dim, [(draw.randrange(num_ranks), length) for length in lengths])
    return found


def compare(name, placements):
    """The worst errors of loss and gradients, the share of parameters held, and what was computed whole."""
    import copy

    with all_in_64_bits():
        model, batch = build(name)
        plain = copy.deepcopy(model)
        torch.manual_seed(7)
        wanted = plain(**batch).loss
        wanted.backward()
        group = tensor_group()
        divide(model, placements(model, dist.get_world_size()), group)
        torch.manual_seed(7)
        loss = model(**batch).loss
        loss.backward()
        settle_gradients(model.parameters())
        after = torch.get_rng_state()
        greatest = max(float(each.grad.norm()) for each in plain.parameters() if each.grad is not None)
        errors = {}
        for key, parameter in model.named_parameters():
            want = plain.get_parameter(key).grad
            have = None if parameter.grad is None else whole(parameter.grad)
            if want is None:
                assert have is None or not have.any(), key
                continue
            errors[key] = float((have - want).norm()) / max(float(want.norm()), 1e-3 * greatest)
    worst = max(errors, key=lambda key: errors[key])
    held = sum(local_of(each).numel() for each in model.parameters())
    total = sum(each.numel() for each in plain.parameters())
    return abs(float(whole(loss) - wanted.detach())), errors[worst], worst, held / total, after.sum().item()


@pytest.mark.parametrize(
    ("num_ranks", "placements", "names"),
    [
        thorough(2, alternating, list(MODELS)),
        (3, at_random, ["gpt2 odd", "llama with one key head", "t5"]),
    ],
    ids=["two ranks, in turn", "any cuts of some"],
)
def test_models(num_ranks, placements, names):
    """All in one start of the ranks, which takes longer than a model; in turn: rows and columns."""

    def compare_all():
        return {name: compare(name, placements) for name in names}

    found = run_ranks(compare_all, num_ranks, timeout_s=240)
    for name in names:
        rows = [each[name] for each in found]
        assert len({draws for *_, draws in rows}) == 1, f"{name}: the ranks drew other random numbers"
        for loss, gradient, worst, held, _ in rows:
            assert loss < 1e-12, name
            assert gradient < 1e-12, f"{name}: {worst}"
            assert placements is at_random or held < 1 / num_ranks + 0.08, name


class Potential(nn.Module):
    """Energies of particles, and forces: the loss asks for the gradient of a gradient."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 48), nn.Linear(48, 48), nn.Linear(48, 1)])

    def forward(self, positions):
        positions = positions.detach().requires_grad_()
        x = positions
        for layer in self.layers:
            x = F.softplus(layer(x))
        return x, torch.autograd.grad(x.sum(), positions, create_graph=True)[0]


def forces(model, batch):
    energy, force = model(batch["x"])
    return F.mse_loss(energy[..., 0], batch["x"].sum(-1)) + F.mse_loss(force, batch["x"])


def test_gradients_of_gradients():
    """What a unit's arguments got as gradients was placed without history: gradients were silently wrong."""

    def particles(batch_size, length):
        return {"x": torch.randn(batch_size, length, 3)}

    recipe = Recipe(build=Potential, batch=particles, loss=forces)
    check(recipe, {"forces": case(2, least_divided=0.9)}, num_ranks=2)
