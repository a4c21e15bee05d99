"""``smp.tp_register``: classes of the script for which distributed modules stand."""

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from compat.reference_layers import PlainLayer
from compat.small_models import QUIET
from shardwright.errors import UsageError
from shardwright.testing import run_ranks

SIZES = {"num_attention_heads": 2, "attention_head_size": 4, "hidden_size": 8, "intermediate_size": 12}


class Config:
    def __init__(self, heads=2, hidden=8):
        self.heads, self.hidden = heads, hidden


class Encoder(nn.Module):
    """A layer with an interface of its own, and the documentation's names inside."""

    def __init__(self, config, intermediate=12):
        super().__init__()
        plain = PlainLayer(
            heads=config.heads,
            size=4,
            hidden=config.hidden,
            intermediate=intermediate,
            pre=False,
            post=True,
            causal=False,
            cross=False,
        )
        self.attention, self.output = plain.attention, plain.output

    def forward(self, hidden, padding=None):
        mask = torch.zeros(1) if padding is None else padding[:, None, None].double() * -1e9
        return {"hidden": self.output(self.attention(hidden, mask))}


def init_hook(config, intermediate=12):
    sizes = {"num_attention_heads": config.heads, "hidden_size": config.hidden, "attention_head_size": 4}
    return (), {
        **sizes,
        "intermediate_size": intermediate,
        "attention_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
    }


def forward_hook(hidden, padding=None):
    mask = None if padding is None else padding[:, None, None].double() * -1e9
    return ((hidden, mask),), {}


def return_hook(result):
    return {"hidden": result[0]}


class Model(nn.Module):
    def __init__(self, kind, *args):
        super().__init__()
        self.encoder = kind(*args)
        self.head = nn.Linear(8, 2)

    def forward(self, x, padding=None):
        return self.head(self.encoder(x, padding=padding)["hidden"])


def test_a_registered_class_is_replaced_when_the_model_is_wrapped():
    def replaced():
        smp.init(QUIET)
        torch.set_default_dtype(torch.float64)

        class Own(Encoder):
            pass

        smp.tp_register_with_module(
            Own, smp.nn.DistributedTransformerLayer, init_hook, forward_hook, return_hook
        )
        torch.manual_seed(0)
        plain = Model(Encoder, Config())
        torch.manual_seed(0)
        with smp.tensor_parallelism():
            model = Model(Own, Config())
        wrapped = smp.DistributedModel(model)
        module = wrapped.get_module()
        assert type(module.encoder) is smp.nn.DistributedTransformerLayer
        assert type(module.head) is smp.nn.DistributedLinear
        x, padding = torch.randn(2, 5, 8), torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]])
        torch.testing.assert_close(wrapped(x, padding), plain(x, padding))  # its weights were taken over
        return list(plain.state_dict()) == list(wrapped.state_dict())

    assert run_ranks(replaced, 1) == [True]


def test_as_documented():
    def documented():
        smp.init(QUIET)

        @smp.tp_register(smp.nn.DistributedTransformer, init_hook=lambda config: ((), config))
        class MyTransformer(nn.Module):
            def __init__(self, config):
                super().__init__()
                self.layer = nn.Linear(8, 8)

            def forward(self, hidden_states, attention_mask):
                return self.layer(hidden_states), attention_mask

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                with smp.tensor_parallelism(num_layers=3):
                    self.encoder = MyTransformer({"num_layers": 2, **SIZES})
                    with smp.tensor_parallelism(enabled=False):
                        self.other = MyTransformer({"num_layers": 2, **SIZES})

            def forward(self, x):
                return self.encoder(x, attention_mask=torch.zeros(1, 1, 1, 4))[0]

        model = smp.DistributedModel(Net()).get_module()
        assert type(model.other) is MyTransformer
        assert len(model.encoder.seq_layers) == 3  # what the context says wins
        return tuple(model(torch.randn(1, 4, 8)).shape)

    assert run_ranks(documented, 1) == [(1, 4, 8)]


class Three(nn.Module):
    def __init__(self, size, depth=2):
        super().__init__()

    def forward(self, query, key, value):
        return query + key + value


@pytest.mark.parametrize(
    ("hooks", "text"),
    [
        (
            {},
            r"Three.forward has the parameters \(query, key, value\), but smp.nn.DistributedTrans",
        ),
        (
            {"forward_hook": lambda query, key: ((), {})},
            r"the forward_hook for Three has the parameters \(query, key",
        ),
        (
            {"forward_hook": lambda query, key, value: ((), {}), "init_hook": lambda size, depth: ((), {})},
            r"the init_hook for Three .* \(size, depth\), but Three.__init__ has \(size, depth=2\)",
        ),
    ],
)
def test_another_signature_is_refused(hooks, text):
    with pytest.raises(UsageError, match=text):
        smp.tp_register_with_module(Three, smp.nn.DistributedTransformerLayer, **hooks)
