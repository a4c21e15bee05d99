"""Models built without memory get the values of models built in the ordinary way.

A model is moved to the device of its rank; tests on a GPU move it for real.
"""

import copy

import pytest
import torch
from torch import nn

from shardwright.torch import delay_param_initialization
from shardwright.torch.parameters.delayed_initialization import is_recorded, recorded_values
from shardwright.torch.parameters.parameter_kinds import move_to
from shardwright.torch.parameters.residency import make_remote


class Initialised(nn.Module):
    """Fills its parameters in many ways."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(128, 128)
        self.embedding = nn.Embedding(200, 128, padding_idx=3)
        self.conv = nn.Conv2d(16, 32, 5)
        self.lstm = nn.LSTM(64, 64)
        self.attention = nn.MultiheadAttention(64, 4)
        self.orthogonal = nn.Parameter(torch.empty(96, 96))
        self.truncated = nn.Parameter(torch.empty(96, 96))
        self.drawn = nn.Parameter(torch.randn(64, 128) * 0.02 + torch.ones(128))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("mask", torch.tril(torch.ones(128, 128)).view(1, 1, 128, 128))
        self.register_buffer("ramp", torch.linspace(0, 1, 20000).to(torch.bfloat16))
        nn.init.orthogonal_(self.orthogonal)
        nn.init.trunc_normal_(self.truncated, std=0.02)
        self.sparse = nn.Parameter(torch.empty(128, 64))
        nn.init.sparse_(self.sparse, 0.5)
        self.twin = copy.deepcopy(self.linear)
        self.tied = nn.Linear(128, 200, bias=False)
        self.tied.weight = self.embedding.weight
        with torch.no_grad():
            self.twin.weight.copy_(self.linear.weight.t())
            self.linear.weight[:4].zero_()
            self.embedding.weight.mul_(self.scale)
        self.apply(self.fill)
        self.normal = nn.Linear(128, 128)  # draws behind all of it

    def fill(self, module):
        if isinstance(module, nn.Conv2d):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.weight.data = module.weight.data / module.weight.data.std()


@pytest.mark.parametrize("seed", [0, 1])
def test_values_are_those_of_ordinary_construction(seed):
    torch.manual_seed(seed)
    plain = Initialised()
    after = torch.rand(3)
    torch.manual_seed(seed)
    with delay_param_initialization():
        delayed = Initialised()
    assert torch.equal(torch.rand(3), after)
    state = torch.get_rng_state()
    recorded = 0
    for (name, expected), (other, found) in zip(
        plain.state_dict(keep_vars=True).items(), delayed.state_dict(keep_vars=True).items(), strict=True
    ):
        assert name == other
        assert found.dtype == expected.dtype
        assert found.stride() == expected.stride()
        if expected.nbytes >= 2**14:
            assert found.is_meta, name
        if found.is_meta:
            assert is_recorded(found)
            recorded += 1
            found = recorded_values(found)
        assert torch.equal(found, expected), name
    assert recorded >= 12
    assert torch.equal(torch.get_rng_state(), state)


def test_large_parameters_alone_are_put_off():
    with delay_param_initialization():
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(20)))
    assert all(layer.weight.is_meta for layer in model)
    assert not any(layer.bias.is_meta for layer in model)


def test_python_may_look_at_values():
    torch.manual_seed(0)
    with delay_param_initialization():
        table = torch.rand(100, 100)
        largest = table.max().item()
        count = int((table > 0.5).nonzero().shape[0])
    torch.manual_seed(0)
    plain = torch.rand(100, 100)
    assert largest == plain.max().item()
    assert count == int((plain > 0.5).sum())


def test_off():
    with delay_param_initialization(enabled=False):
        assert not nn.Linear(200, 200).weight.is_meta


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "mixtral", "vit", "mamba"])
def test_models_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 500,
    }
    settings = {
        "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500},
        "t5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 500},
    }.get(name, sizes)
    config = transformers.AutoConfig.for_model(name, **settings)

    def build():
        torch.manual_seed(0)
        return transformers.AutoModel.from_config(config)

    plain = build()
    with delay_param_initialization():
        delayed = build()
    found = delayed.state_dict()
    assert any(value.is_meta for value in found.values())
    for key, expected in plain.state_dict().items():
        value = found[key]
        assert torch.equal(recorded_values(value) if value.is_meta else value, expected), key


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
