"""A model trained over stages and replicas, exported, is what from_pretrained gives.

A run goes on from a model that was imported, in any layout.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from sharded import QUIET, VOCABULARY
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.cli import main
from shardwright.testing import RanksFailedError, run_ranks


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


@pytest.mark.thorough
def test_from_pretrained_gives_the_weights(tmp_path: Path, capabilities: dict[str, bool]) -> None:
    """Of two stages of two ranks that share parameters: whole, in shards, and in 16 bits."""
    if not capabilities["transformers"]:
        pytest.skip("transformers is not installed")
    from transformers import AutoModelForCausalLM

    state = run_ranks(_trained, 4, SHARDS, tmp_path / "run", tied=True, wrapped=True)[0]
    config, prefix = tmp_path / "config.json", "model."
    config.write_text(_gpt2(True).config.to_json_string())
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
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
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


class Language(nn.Module):
    """A head that may have the weights of the embedding, and a buffer."""

    scale: Tensor

    def __init__(self, *, tied: bool):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(4)))
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.ones(8))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(x)) * self.scale)


def _trained_elsewhere(*, tied: bool) -> Language:
    torch.manual_seed(7)
    model = Language(tied=tied)
    model.scale.uniform_()
    return model


def _resumed(settings: dict[str, Any], folder: Path, *, tied: bool) -> tuple[int, dict[str, Tensor], float]:
    """Step, state and the loss of a step, of a run that resumes."""
    sw.init({**QUIET, **settings})
    torch.manual_seed(1)
    model = sw.DistributedModel(Language(tied=tied))
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    step = sw.Checkpoints(folder, state={"scheduler": scheduler}).resume()
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        model.backward(loss)
        return loss

    loss = train(model, torch.arange(8)[:, None]).reduce_mean().item()
    optimizer.step()
    return step, state, loss


def _import(*words: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["ckpt", "import", *map(str, words)])
    assert not ended.value.code


LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "one rank": ({}, 1),
    "pipeline": ({"pipeline_parallel_degree": 2, "microbatches": 2}, 2),
    "shards": ({"sharded_data_parallel_degree": 2}, 2),
    "tensor": ({"tensor_parallel_degree": 2}, 2),
}


@pytest.mark.parametrize(
    ("layout", "saved_tied", "tied"),
    [("one rank", True, True), ("pipeline", True, False), ("shards", False, False), ("tensor", True, False)],
)
def test_a_run_begins_with_an_imported_model(
    layout: str, tied: bool, saved_tied: bool, tmp_path: Path
) -> None:
    """Models that share a weight and those that do not take what those that do have saved."""
    theirs = _trained_elsewhere(tied=saved_tied)
    torch.save({"state_dict": theirs.state_dict()}, tmp_path / "x.pt")
    _import(tmp_path / "x.pt", "--to", tmp_path / "run", "--key", "state_dict", "--step", 30)
    settings, ranks = LAYOUTS[layout]
    x = torch.arange(8)[:, None]
    expected = F.cross_entropy(theirs(x).flatten(0, 1), x.flatten()).item()
    results = run_ranks(_resumed, ranks, settings, tmp_path / "run", tied=tied)
    for step, state, _ in results:
        assert step == 30
        assert state.keys() == theirs.state_dict().keys()
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(state[name], tensor), name
    assert sum(loss for _, _, loss in results) / ranks == pytest.approx(expected, rel=1e-5)


def test_a_tied_tensor_may_have_either_name(tmp_path: Path) -> None:
    """Files of Hugging Face have one name of a tied tensor, and not always the first."""
    theirs = _trained_elsewhere(tied=True)
    state = {name: tensor for name, tensor in theirs.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "x.safetensors")
    _import(tmp_path / "x.safetensors", "--to", tmp_path / "run")
    _, loaded, _ = run_ranks(_resumed, 2, LAYOUTS["pipeline"][0], tmp_path / "run", tied=True)[1]
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(loaded[name], tensor), name


def test_a_model_of_other_names_is_refused(tmp_path: Path) -> None:
    torch.save(_trained_elsewhere(tied=False).state_dict(), tmp_path / "x.pt")
    _import(tmp_path / "x.pt", "--to", tmp_path / "run", "--prefix", "model.")
    with pytest.raises(RanksFailedError, match=r"only in the checkpoint: model\.blocks\.0\.0\.bias"):
        run_ranks(_resumed, 1, {}, tmp_path / "run", tied=False)
