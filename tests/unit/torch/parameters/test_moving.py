"""A model is moved to the device of its rank; tests on a GPU move it for real."""

import torch
from torch import nn

from shardwright.torch.parameters.parameter_kinds import move_to
from shardwright.torch.parameters.residency import make_remote


def test_tensors_of_other_ranks_and_without_memory_stay(monkeypatch):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, device="meta"))
    remote = model[0].bias
    make_remote(remote, "0.bias", [1], device=torch.device("cpu", 0))
    asked = []
    original = torch.Tensor.to

    def to(tensor, device, *args, **kwargs):
        asked.append(tuple(tensor.shape))
        return original(tensor, "cpu", *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    weight = model[0].weight
    weight.grad = torch.ones(2, 2)
    move_to(model, torch.device("cuda", 0))
    # The weight with its gradient, then weight, bias, mean, variance and count of the norm.
    assert asked == [(2, 2), (2, 2), (2,), (2,), (2,), (2,), ()]
    assert model[0].weight is weight
    assert torch.equal(weight.grad, torch.ones(2, 2))
    assert model[0].bias is remote
