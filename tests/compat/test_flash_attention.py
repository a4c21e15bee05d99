"""``smp.model_creation(tensor_parallelism=True)``: attention without a table of scores, at degree 1, too."""

from typing import Any

import pytest
import torch

import smdistributed.modelparallel.torch as smp
from compat.small_models import QUIET
from shardwright.testing import run_ranks
from six_models import SIX, build

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")


def kernels(
    partitions: int, name: str, creation: str, enabled: bool, options: dict[str, Any], config: dict[str, Any]
) -> Any:
    """What the layers took, and the loss of a step."""
    from shardwright.torch.attention.hugging_face import kernels_of

    smp.init({**QUIET, "partitions": partitions, "microbatches": 2})
    torch.manual_seed(0)
    if creation == "set_tensor_parallelism":
        model = build(name, **config)
        smp.set_tensor_parallelism(model, enabled, **options)
    else:
        with getattr(smp, creation)(enabled, **options):
            model = build(name, **config)
    wrapped = smp.DistributedModel(model)

    @smp.step
    def train_step(model, ids):
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    ids = torch.randint(3, 96, (4, 16), generator=torch.Generator().manual_seed(1))
    loss = train_step(wrapped, ids).reduce_mean()
    return {choice.kernel for choice in kernels_of(model).values()}, round(loss.item(), 4)


@pytest.mark.parametrize("name", SIX)
def test_tensor_parallelism_routes_attention(name):
    expected = {"flash", "blockwise"} if name == "GPT-Neo" else {"flash"}
    ((found, loss),) = run_ranks(kernels, 1, 1, name, "model_creation", True, {"fused_softmax": True}, {})
    assert found == expected
    ((plain, plain_loss),) = run_ranks(kernels, 1, 1, name, "model_creation", False, {}, {})
    assert plain == set()
    assert loss == pytest.approx(plain_loss, abs=2e-4)


@pytest.mark.parametrize(
    ("creation", "enabled", "options", "config", "expected"),
    [
        ("tensor_parallelism", True, {}, {}, {"flash"}),
        ("tensor_parallelism", False, {}, {}, set()),
        ("tensor_parallelism", True, {"flash_attention": False}, {}, {"plain"}),
        ("set_tensor_parallelism", True, {}, {}, {"flash"}),
        ("set_tensor_parallelism", True, {"flash_attention": False}, {}, {"plain"}),
        ("set_tensor_parallelism", False, {}, {}, set()),
        ("model_creation", True, {"flash_attention": False}, {}, {"plain"}),
        ("model_creation", False, {"flash_attention": True}, {}, {"flash"}),
        ("model_creation", True, {}, {"attn_implementation": "eager"}, {"eager"}),
    ],
)
def test_what_a_script_chooses(creation, enabled, options, config, expected):
    ((found, _),) = run_ranks(kernels, 1, 1, "GPT-J", creation, enabled, options, config)
    assert found == expected


def test_over_two_partitions():
    one, two = (run_ranks(kernels, n, n, "GPT-Neo", "model_creation", True, {}, {}) for n in (1, 2))
    assert two[0] == one[0]
    assert two[1][1] == one[0][1]
