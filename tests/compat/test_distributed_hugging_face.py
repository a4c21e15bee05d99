"""Models of transformers whose layers are distributed: the same results, other names."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from compat.small_models import QUIET
from shardwright.errors import UsageError
from shardwright.testing import run_ranks
from shardwright.torch.units.tensor_division import pinned_placements
from six_models import SIX, build

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")

# These compute scores and losses in float32, whatever the model's type is.
_IN_32_BITS = {"GPT-J", "GPT-Neo"}
PATHS = {
    "BERT": "bert.encoder",
    "RoBERTa": "roberta.encoder",
    "GPT-2": "transformer",
    "GPT-J": "transformer",
    "GPT-Neo": "transformer",
    "GPT-NeoX": "gpt_neox",
}
MODULES = {name: name.lower().replace("-", "") for name in SIX}


def translators(name: str) -> tuple[Any, Any]:
    from importlib import import_module

    family = MODULES[name]
    module = import_module(f"smdistributed.modelparallel.torch.nn.huggingface.{family}")
    to_hf = getattr(module, f"translate_state_dict_to_hf_{family}")
    return to_hf, getattr(module, f"translate_hf_state_dict_to_smdistributed_{family}")


def feed() -> dict[str, torch.Tensor]:
    """Two sequences, one of them with padding on the right."""
    ids = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def both(name: str, settings: dict[str, Any] | None = None, **options: Any) -> tuple[nn.Module, Any]:
    """A plain model, and a wrapped one with distributed layers and the same seed."""
    smp.init({**QUIET, **(settings or {})})
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    plain = build(name)
    torch.manual_seed(0)
    with smp.model_creation(tensor_parallelism=True, **options):
        model = build(name)
    return plain, smp.DistributedModel(model)


def differences(name: str, options: dict[str, Any]) -> Any:
    """Between results and gradients, in names and of translated states."""
    plain, model = both(name, **options)
    batch = feed()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    wanted, found = plain(**batch, labels=labels), model(**batch, labels=labels)
    real = batch["attention_mask"].bool()
    logits = (found.logits - wanted.logits)[real].abs().max().item()
    wanted.loss.backward()
    found.loss.backward()
    to_hf, to_smp = translators(name)
    hf, state = plain.state_dict(), model.state_dict()
    gradients = {key: p.grad for key, p in model.get_module().named_parameters()}
    expected = to_smp({key: p.grad for key, p in plain.named_parameters()})
    assert not set(gradients) ^ set(expected)
    gradient = max(float((gradients[key] - expected[key]).abs().max()) for key in expected)
    there, back = to_smp(hf), to_hf(to_smp(hf), max_seq_len=64)
    assert set(state) == set(there)
    assert all(torch.equal(state[key], there[key]) for key in state)
    assert set(back) == set(hf)
    assert all(torch.equal(back[key], hf[key]) and back[key].shape == hf[key].shape for key in hf)
    assert all(torch.equal(value, hf[key]) for key, value in to_hf(state).items())
    return logits, gradient, abs(found.loss.item() - wanted.loss.item()), sorted(state)


@pytest.mark.parametrize("name", SIX)
@pytest.mark.parametrize("flash", [True, False])
def test_distributed_layers_compute_what_the_models_own_do(name, flash):
    ((logits, gradient, loss, names),) = run_ranks(differences, 1, name, {"flash_attention": flash})
    bound = 2e-6 if name in _IN_32_BITS else 1e-12
    assert logits < bound
    assert gradient < bound
    assert loss < 1e-6  # transformers computes losses in float32
    prefix = f"{PATHS[name]}.seq_layers.0."
    inner = {each.removeprefix(prefix) for each in names if each.startswith(prefix)}
    fused = {"attention.query_key_value.weight"}
    split = {f"attention.{part}.weight" for part in ("query", "key", "value")}
    assert (fused if name == "GPT-NeoX" else split) <= inner
    assert {"attention.dense.weight", "output.dense1.weight", "output.dense2.bias"} <= inner


def steps(name: str, num_stages: int, settings: dict[str, Any]) -> Any:
    """Losses of two steps, recomputed, beside those of the plain model."""
    plain, model = both(name, {"partitions": num_stages, "microbatches": 2, **settings})
    from functools import reduce

    layers = reduce(getattr, f"{PATHS[name]}.seq_layers".split("."), model.get_module())
    smp.set_activation_checkpointing(layers, pack_args_as_tuple=True, strategy="each")
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)

    @smp.step
    def train_step(model, input_ids, attention_mask):
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
        model.backward(loss)
        return loss

    found, wanted = [], []
    for _ in range(2):
        batch = feed()
        optimizer.zero_grad()
        found.append(train_step(model, batch["input_ids"], batch["attention_mask"]).reduce_mean().item())
        optimizer.step()
        reference.zero_grad()
        losses = [
            plain(input_ids=ids, attention_mask=mask, labels=ids).loss / 2
            for ids, mask in zip(*(tensor.split(1) for tensor in batch.values()), strict=True)
        ]
        sum(losses).backward()
        reference.step()
        wanted.append(sum(losses).item())
    state = model.state_dict()
    to_hf, _ = translators(name)
    hf = to_hf(state)
    difference = max(float((hf[key] - value).abs().max()) for key, value in plain.state_dict().items())
    return found, wanted, difference


@pytest.mark.parametrize("name", ["BERT", "GPT-J"])
def test_over_two_stages(name):
    results = run_ranks(steps, 2, name, 2, {})
    for found, wanted, difference in results:
        assert found == pytest.approx(wanted, abs=1e-6)
        assert difference < 1e-6


@pytest.mark.parametrize("enabled", [True, False])
def test_models_are_marked_after_they_are_created(enabled):
    def marked(enabled: bool) -> Any:
        smp.init(QUIET)
        torch.set_default_dtype(torch.float64)
        model = build("BERT")
        plain = copy.deepcopy(model)
        smp.set_tensor_parallelism(model, enabled)
        wrapped = smp.DistributedModel(model)
        difference = (wrapped(**feed()).logits - plain(**feed()).logits)[feed()["attention_mask"].bool()]
        return difference.abs().max().item(), "seq_layers" in "".join(wrapped.state_dict())

    ((difference, is_distributed),) = run_ranks(marked, 1, enabled)
    assert difference < 1e-12
    assert is_distributed == enabled


def test_options_reach_the_layers():
    def layers_with(**options: Any) -> Any:
        _, model = both("GPT-2", **options)
        return model.get_module().transformer.seq_layers[1].attention.options

    def found() -> Any:
        options = layers_with(
            use_alibi=True, attention_in_fp32=True, fp32_residual_addition=True, query_key_layer_scaling=True
        )
        assert options.use_alibi
        assert options.attention_in_fp32
        assert options.fp32_residual_addition
        return options.layer_idx

    assert run_ranks(found, 1) == [1]


def test_embeddings_are_distributed_on_request():
    def placed(distributed: bool) -> Any:
        _, model = both("GPT-2", distribute_embedding=distributed)
        found = pinned_placements(model.get_module(), num_ranks=2)
        return str(found["transformer.wte.weight"])

    assert run_ranks(placed, 1, True) == ["cut 0 (r0:48 r1:48)"]
    assert run_ranks(placed, 1, False) == ["whole"]


def test_what_distributed_layers_do_not_do_is_refused():
    def refused() -> Any:
        _, model = both("GPT-J")
        with pytest.raises(UsageError, match="keep no attention weights"):
            model(**feed(), output_attentions=True)
        return True

    assert run_ranks(refused, 1) == [True]


def test_single_layers_are_registered_as_published():
    """After the model is created; the layers keep their place in it."""

    def registered() -> float:
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block

        from smdistributed.modelparallel.torch.nn.huggingface import gpt2

        smp.init(QUIET)
        torch.set_default_dtype(torch.float64)
        plain = build("GPT-2")
        model = copy.deepcopy(plain)
        smp.set_tensor_parallelism(model.transformer.h, True)
        hooks = gpt2.get_hf_gpt2_transformer_layer_hooks()
        smp.tp_register_with_module(GPT2Block, smp.nn.DistributedTransformerLayer, *hooks)
        wrapped = smp.DistributedModel(model)
        layers = wrapped.get_module().transformer.h
        assert {type(layer) for layer in layers} == {smp.nn.DistributedTransformerLayer}
        real = feed()["attention_mask"].bool()
        difference = (wrapped(**feed()).logits - plain(**feed()).logits)[real].abs().max().item()
        state, hf = wrapped.state_dict(), plain.state_dict()
        assert "transformer.h.3.attention.query.weight" in state
        back = gpt2.translate_layer_state_dict_to_hf_gpt2_block(state, 64)
        assert set(back) == set(hf)
        assert all(torch.equal(back[key], hf[key]) for key in hf)
        wrapped.load_state_dict(gpt2.translate_hf_block_state_dict_to_smdistributed(hf, 64))
        return difference

    ((difference),) = run_ranks(registered, 1)
    assert difference < 1e-12
