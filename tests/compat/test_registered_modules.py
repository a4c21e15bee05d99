"""``smp.tp_register``: classes of the script for which distributed modules stand."""

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from compat.small_models import QUIET
from shardwright.errors import UsageError
from shardwright.testing import run_ranks

SIZES = {"num_attention_heads": 2, "attention_head_size": 4, "hidden_size": 8, "intermediate_size": 12}


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
