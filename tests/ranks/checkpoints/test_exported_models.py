"""A model trained over stages and replicas, exported, is what from_pretrained gives."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded import QUIET
from torch import Tensor, nn

from choices import in_sweep
from shardwright.cli import main
from shardwright.testing import run_ranks


def _gpt2(tied: bool) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3,
        n_embd=16,
        n_head=2,
        vocab_size=40,
        n_positions=12,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=tied,
    )
    return GPT2LMHeadModel(config)


class Wrapped(nn.Module):
    """A model of Hugging Face inside of a script's own module."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        return self.model(tokens, labels=labels)


def _trained(settings: dict[str, Any], folder: Path, *, tied: bool, wrapped: bool) -> dict[str, Tensor]:
    """Makes two steps and saves; returns the whole state."""
    import shardwright.torch as sw

    sw.init({**QUIET, **settings})
    model = sw.DistributedModel(Wrapped(_gpt2(tied)) if wrapped else _gpt2(tied))
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    checkpoints = sw.Checkpoints(folder)

    @sw.step
    def train(model: Any, tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens, labels=tokens).loss
        model.backward(loss)
        return loss

    generator = torch.Generator().manual_seed(sw.dp_rank())
    for _ in range(2):
        optimizer.zero_grad()
        train(model, torch.randint(0, 40, (4, 8), generator=generator))
        optimizer.step()
    checkpoints.save(2)
    checkpoints.wait()
    state: dict[str, Tensor] = model.state_dict()
    return state


STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2}
SHARDS = {**STAGES, "sharded_data_parallel_degree": 2}
TENSOR = {**STAGES, "tensor_parallel_degree": 2}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "tied", "wrapped"),
    [
        (SHARDS, True, True),
        in_sweep(TENSOR, True, False),
        in_sweep(SHARDS, False, False),
        in_sweep(TENSOR, False, True),
    ],
)
def test_from_pretrained_gives_the_weights(
    settings: dict[str, Any], tied: bool, wrapped: bool, tmp_path: Path, capabilities: dict[str, bool]
) -> None:
    """Of two stages of two ranks that share parameters: whole, in shards, and in 16 bits."""
    if not capabilities["transformers"]:
        pytest.skip("transformers is not installed")
    from transformers import AutoModelForCausalLM

    state = run_ranks(_trained, 4, settings, tmp_path / "run", tied=tied, wrapped=wrapped)[0]
    prefix, words = "", []
    if wrapped:  # the checkpoint does not know the configuration of what is inside
        config, prefix = tmp_path / "config.json", "model."
        config.write_text(_gpt2(tied).config.to_json_string())
        words = ["--prefix", prefix, "--config", str(config)]
    for command in ("ls", "verify"):
        with pytest.raises(SystemExit) as ended:
            main(["ckpt", command, str(tmp_path / "run")])
        assert not ended.value.code
    tokens = torch.arange(8)[None]
    for number, more in enumerate([[], ["--max-shard-size", "10kB"], ["--dtype", "bf16"]]):
        out = tmp_path / f"out-{number}"
        with pytest.raises(SystemExit) as ended:
            main(["ckpt", "export", str(tmp_path / "run"), "--to", str(out), *words, *more])
        assert not ended.value.code
        loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert not info["mismatched_keys"]
        dtype = torch.bfloat16 if more[-1:] == ["bf16"] else torch.float32
        found = loaded.state_dict()
        assert {f"{prefix}{name}" for name in found} == set(state)
        for name, tensor in found.items():
            assert tensor.dtype == dtype
            assert torch.equal(tensor, state[f"{prefix}{name}"].to(dtype)), name
        assert (loaded.lm_head.weight is loaded.transformer.wte.weight) == tied
        assert loaded(tokens).logits.isfinite().all()
    assert len(list((tmp_path / "out-1").glob("*.safetensors"))) > 3
    assert json.loads((tmp_path / "out-2" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_state_dict_of_tied_weights_loads_into_the_plain_model(tmp_path, capabilities) -> None:
    """``lm_head.weight`` was missing in it: tied weights were there under one of their names."""
    if not capabilities["transformers"]:
        pytest.skip("transformers is not installed")
    state = run_ranks(_trained, 2, STAGES, tmp_path / "run", tied=True, wrapped=False)[0]
    with pytest.raises(SystemExit) as ended:
        main(["ckpt", "export", str(tmp_path / "run"), "-o", str(tmp_path / "out"), "--format", "state-dict"])
    assert not ended.value.code
    exported = torch.load(tmp_path / "out" / "model.pt")
    tokens, logits, continued = torch.arange(8)[None], [], []
    for each in (state, exported):
        plain = _gpt2(tied=True)
        plain.load_state_dict(each)  # strict
        logits.append(plain(tokens).logits)
        continued.append(plain.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0))
    assert torch.equal(*logits)
    assert torch.equal(*continued)
    assert exported["lm_head.weight"].data_ptr() == exported["transformer.wte.weight"].data_ptr()
