"""Adapters of PEFT train on any plan as in one process, and are saved, loaded and merged alone."""

import copy
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import (
    Kept,
    batch,
    gpt2,
    llama,
    loss_of,
    optimizer_of,
    outputs,
    train_each,
    with_adapter,
)
from torch import Tensor

from shardwright.testing import run_ranks

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning")

STAGES = {"pipeline_parallel_degree": 2}
SHARDS = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1}
TENSOR = {"tensor_parallel_degree": 2}
EXACT, OWN_TYPE = 1e-10, 1e-5
"""Llama computes its norms in float32, whatever its type."""


def exact_llama(**settings: Any) -> Any:
    return with_adapter(llama().double(), **settings)


def exact_gpt2(**settings: Any) -> Any:
    return with_adapter(gpt2().double(), target_modules=["c_attn"], fan_in_fan_out=True, **settings)


def llama_all_linear() -> Any:
    return exact_llama(target_modules="all-linear")


def llama_dora() -> Any:
    return exact_llama(use_dora=True, target_modules=["q_proj", "down_proj"])


def llama_with_a_new_head() -> Any:
    return exact_llama(modules_to_save=["lm_head"])


def llama_with_a_tied_head() -> Any:
    """The file of the adapter has embedding and head, which are one parameter."""
    both = {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
    return with_adapter(llama(tie_word_embeddings=True).double(), **both)


def llama_with_trained_tokens() -> Any:
    """The head computes its weight of a frozen one and of some trained rows, and compares no samples."""
    return with_adapter(llama(tie_word_embeddings=True).double(), trainable_token_indices=[1, 2, 5])


def llama_rotated() -> Any:
    """Orthogonal fine-tuning keeps indices in buffers that no state has, and a stage has only its own."""
    from peft import OFTConfig

    return with_adapter(llama().double(), OFTConfig, r=0, oft_block_size=8, target_modules=["q_proj"])


def llama_scaled() -> Any:
    from peft import IA3Config

    scaled = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    return with_adapter(llama().double(), IA3Config, **scaled)


def llama_late() -> Any:
    """The first stage has nothing to train, and no backward."""
    return exact_llama(layers_to_transform=[3])


def saved_and_loaded(plain: Any, model: Any, *, folder: Path) -> None:
    """What is saved, plain PEFT has; and the wrapped model takes it back, and stays as it is when merged."""
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    from shardwright.integrations.peft import adapter_state, load_adapter, save_adapter, save_merged

    weights = [parameter.detach().clone() for parameter in model.local_parameters()]
    save_merged(model, folder / "merged")
    assert all(map(torch.equal, weights, model.local_parameters()))
    before = adapter_state(model)
    save_adapter(model, folder)
    with torch.no_grad():
        for parameter in model.local_parameters():
            if parameter.requires_grad:
                parameter.zero_()
    load_adapter(model, folder)
    after = adapter_state(model)
    loaded = copy.deepcopy(plain)
    for parameter in loaded.parameters():
        if parameter.requires_grad:
            torch.nn.init.zeros_(parameter)
    set_peft_model_state_dict(loaded, load_peft_weights(str(folder)))
    torch.testing.assert_close(outputs(loaded), outputs(plain), rtol=1e-5, atol=1e-5)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def check(kept: list[Kept], limit: float) -> None:
    for each in kept:
        assert each["gradients"] < limit
        assert each["weights"] < limit
    losses = torch.tensor([each["losses"] for each in kept], dtype=torch.float64).mean(0)
    expected = torch.tensor(kept[0]["expected"], dtype=torch.float64)
    torch.testing.assert_close(losses, expected, rtol=limit, atol=limit)


def run(num_ranks: int, cases: Mapping[str, tuple[Any, Any]], then: Any = None) -> list[dict[str, Kept]]:
    env = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    return run_ranks(train_each, num_ranks, cases, then, timeout_s=300, env=env)


def test_lora_over_stages_shards_and_tensor_degree_is_saved_and_loaded_by_peft(tmp_path: Path) -> None:
    """The adapter of a Llama on eight ranks gives the outputs of the one that plain PEFT has trained."""

    def save(plain: Any, model: Any) -> tuple[Tensor, list[str]]:
        from shardwright.integrations.peft import load_adapter, save_adapter, save_merged

        save_adapter(model, tmp_path / "adapter")
        save_merged(model, tmp_path / "merged")
        load_adapter(model, tmp_path / "adapter")
        return outputs(plain)

    kept = [each[""] for each in run(8, {"": (exact_llama, {**STAGES, **SHARDS, **TENSOR})}, save)]
    check(kept, OWN_TYPE)
    from peft import PeftModel
    from safetensors import safe_open
    from transformers import LlamaForCausalLM

    names = {each.name for each in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    with safe_open(tmp_path / "adapter/adapter_model.safetensors", "pt") as file:
        stored = list(file.keys())
    assert stored
    assert all("lora_" in name for name in stored)
    loaded = PeftModel.from_pretrained(llama().double(), tmp_path / "adapter")
    torch.testing.assert_close(outputs(loaded), kept[0]["then"], rtol=1e-5, atol=1e-5)
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    torch.testing.assert_close(outputs(merged), kept[0]["then"], rtol=1e-5, atol=1e-5)


CASES: dict[str, tuple[Any, dict[str, Any], float]] = {
    "stages": (exact_gpt2, STAGES, EXACT),
    "shards": (exact_gpt2, SHARDS, EXACT),
    "tensor": (exact_gpt2, TENSOR, EXACT),
    "replicas": (exact_gpt2, {"pipeline_parallel_degree": 1}, EXACT),
    "recomputed": (exact_gpt2, {**STAGES, "activation_checkpointing": "full", "pipeline": "zb_h1"}, EXACT),
    "all-linear": (llama_all_linear, STAGES, OWN_TYPE),
    "DoRA": (llama_dora, TENSOR, OWN_TYPE),
    "new head": (llama_with_a_new_head, SHARDS, OWN_TYPE),
    "late": (llama_late, STAGES, OWN_TYPE),
    "tied head": (llama_with_a_tied_head, STAGES, OWN_TYPE),
    "trained tokens": (llama_with_trained_tokens, TENSOR, OWN_TYPE),
    "IA3": (llama_scaled, STAGES, OWN_TYPE),
    "OFT": (llama_rotated, STAGES, OWN_TYPE),
}


def test_adapters_train_as_in_one_process_and_come_back(tmp_path: Path) -> None:
    kept = run(
        2, {name: each[:2] for name, each in CASES.items()}, partial(saved_and_loaded, folder=tmp_path)
    )
    for name, (_, _, limit) in CASES.items():
        check([each[name] for each in kept], limit)


def prompts(folder: Path) -> tuple[list[str], bool]:
    """What is said where prompts are saved, or merged; and whether they are in the whole state."""
    from peft import PromptTuningConfig, get_peft_model

    import shardwright.torch as sw
    from shardwright.errors import UsageError
    from shardwright.integrations.peft import save_adapter, save_merged

    sw.init({"run_dir": "off"})
    config = PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    model = sw.DistributedModel(get_peft_model(gpt2(), config))
    said = []
    for save in (save_adapter, save_merged):
        with pytest.raises(UsageError) as caught:
            save(model, folder)
        said.append(str(caught.value))
    plain = get_peft_model(gpt2(), config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    return said, torch.equal(
        *(m.state_dict()["prompt_encoder.default.embedding.weight"] for m in (model, plain))
    )


def test_prompts_are_saved_by_way_of_the_whole_state(tmp_path: Path) -> None:
    ((said, same),) = run_ranks(prompts, 1, tmp_path / "adapter", timeout_s=120, env={"HF_HUB_OFFLINE": "1"})
    assert "plain.load_state_dict(state)" in said[0]
    assert "PROMPT_TUNING changes what the base model is given" in said[1]
    assert same
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()


def refused(folder: Path) -> list[str]:
    """What is said to adapters that do not fit, and whether one is taken before the first step."""
    import shardwright.torch as sw
    from shardwright.errors import UsageError
    from shardwright.integrations.peft import adapter_state, load_adapter, save_adapter

    said, states = [], []
    for settings in ({}, {"r": 8}, {"lora_alpha": 99}, {"target_modules": ["q_proj", "o_proj"]}, None, {}):
        sw.init({"run_dir": "off"})
        model = sw.DistributedModel(llama() if settings is None else with_adapter(llama(), **settings))
        try:
            if states:
                load_adapter(model, folder)
            else:
                save_adapter(model, folder)
            states.append(adapter_state(model))
            if len(states) == 1:
                load_adapter(model, folder / "nothing")
        except UsageError as error:
            said.append(str(error))
        finally:
            sw.shutdown()
    first, last = states
    assert all(torch.equal(tensor, last[name]) for name, tensor in first.items())
    return said


def test_adapters_of_other_models_are_refused(tmp_path: Path) -> None:
    (said,) = run_ranks(refused, 1, tmp_path / "adapter", timeout_s=120, env={"HF_HUB_OFFLINE": "1"})
    expected = [
        "nothing has no adapter_config.json",
        r"of shape \(4, 64\), here \(8, 64\) \(and 15 more differ\)",
        "has lora_alpha 8, and that of this model 99",
        "which this model lacks",
        "is no wrapped model of PEFT",
    ]
    assert len(said) == len(expected)
    for words, pattern in zip(said, expected, strict=True):
        assert re.search(pattern, words), words
        assert "\n" not in words


def copies_in_float32(settings: Mapping[str, Any]) -> tuple[int, int, list[float]]:
    """Bytes of the copies that updates are made in, those of the adapters here, and some losses."""
    import shardwright.torch as sw

    sw.init({"microbatches": 2, "profile": "estimated", "run_dir": "off", "bf16": True, **settings})
    try:
        model = sw.DistributedModel(with_adapter(llama()).train())
        optimizer = sw.DistributedOptimizer(optimizer_of(model))

        @sw.step
        def train(model: Any, ids: Tensor) -> Tensor:
            loss = loss_of(model, ids)
            model.backward(loss)
            return loss

        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            losses.append(train(model, batch(0)).reduce_mean().item())
            optimizer.step()
        parts = model.replicas.updated_parts
        trained = [p for p in model.local_parameters() if p.requires_grad]
        local = sum(getattr(each, "local", each).numel() for each in trained)
        return 0 if parts is None else parts.num_bytes, 4 * local, losses
    finally:
        sw.shutdown()


def test_frozen_weights_in_16_bits_have_no_copies_in_float32() -> None:
    for settings in (STAGES, SHARDS):
        for copies, expected, losses in run_ranks(copies_in_float32, 2, settings, timeout_s=120):
            assert copies == expected > 0
            assert losses[-1] < losses[0]
