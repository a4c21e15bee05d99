"""``shardwright ckpt export``: what another library then loads is what was saved."""

import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from checkpoint.models import save_model
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from cli.calling import call
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.checkpoint.hugging_face import ModelTensors, export_files


def _state() -> dict[str, Tensor]:
    """Tensors of all kinds, saved in two or three pieces each; see `save_model`."""
    generator = torch.Generator().manual_seed(0)
    state = {f"h.{i}.weight": torch.randn(7, 5, generator=generator) for i in range(12)}
    return state | {
        "head": torch.randn(40, 3, 2, generator=generator).to(torch.bfloat16),
        "half": torch.randn(9, generator=generator).half(),
        "double": torch.randn(6, generator=generator).double(),
        "mask": torch.tensor([True, False, True]),
        "count": torch.tensor(12345678901),
        "empty": torch.zeros(0, 4),
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints of a model."""
    for step in (10, 20):
        state = _state() if step == 20 else {name: tensor + 1 for name, tensor in _state().items()}
        save_model(tmp_path / "run" / "checkpoints", step, state, config={"model_type": "gpt2"})
    return tmp_path / "run"


def _same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


def test_files_of_hugging_face(run, tmp_path, capsys):
    code, out, err = call(capsys, "ckpt", "export", run, "--to", tmp_path / "out")
    assert code == 0
    assert out.startswith("wrote 18 tensors (2.2 KiB) of step-00000020 to ")
    assert "verifying" in err
    _same(load_file(tmp_path / "out" / "model.safetensors"), _state())
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "gpt2", "dtype": "float32"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert not list(tmp_path.glob("*.tmp-*"))


def test_shards_have_the_size_that_was_asked_for(run, tmp_path, capsys):
    call(capsys, "ckpt", "export", run, "--to", tmp_path / "out", "--max-shard-size", "300")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found: dict[str, Tensor] = {}
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    for number, path in enumerate(files, start=1):
        assert path.name == f"model-{number:05}-of-{len(files):05}.safetensors"
        part = load_file(path)
        assert {name: index["weight_map"][name] for name in part} == dict.fromkeys(part, path.name)
        assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= 300
        found |= part
    assert len(files) > 5
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in _state().values())}
    _same(found, _state())
    in_order = [name for path in files for name in sorted(load_file(path)) if name.startswith("h.")]
    assert sorted(in_order[:4]) == [f"h.{i}.weight" for i in range(4)]


@pytest.mark.parametrize(
    ("option", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_numbers_get_the_type_that_was_asked_for(run, tmp_path, capsys, option, dtype):
    call(capsys, "ckpt", "export", run, "--to", tmp_path / "out", "--dtype", option)
    expected = {name: t.to(dtype) if t.is_floating_point() else t for name, t in _state().items()}
    _same(load_file(tmp_path / "out" / "model.safetensors"), expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")


def test_one_checkpoint_of_several(run, tmp_path, capsys):
    older = run / "checkpoints" / "step-00000010"
    code, out, _ = call(capsys, "ckpt", "export", older, "--to", tmp_path / "a", "--json")
    assert code == 0
    document = json.loads(out)
    assert (document["step"], document["tensors"]) == (10, 18)
    assert document["files"] == ["model.safetensors", "config.json"]
    call(capsys, "ckpt", "export", run / "checkpoints", "--name", older.name, "--to", tmp_path / "b")
    first, second = (load_file(tmp_path / each / "model.safetensors") for each in "ab")
    _same(first, second)
    assert torch.equal(first["half"], _state()["half"] + 1)
    code, _, err = call(capsys, "ckpt", "export", older, "--name", "step-00000020", "--to", tmp_path / "c")
    assert (code, "Leave one of them out" in err) == (2, True)


def test_prefixes(tmp_path, capsys):
    wrapped = {f"model.{name}": tensor for name, tensor in _state().items()}
    save_model(tmp_path / "run", 1, wrapped)
    call(capsys, "ckpt", "export", tmp_path / "run", "--to", tmp_path / "out", "--prefix", "model.")
    _same(load_file(tmp_path / "out" / "model.safetensors"), _state())
    save_model(tmp_path / "other", 1, wrapped | {"scale": torch.ones(2), "model.": torch.ones(1)})
    code, _, err = call(
        capsys, "ckpt", "export", tmp_path / "other", "--to", tmp_path / "no", "--prefix", "model."
    )
    assert code == 2
    assert "2 of 20 tensors" in err
    assert "have no prefix 'model.': model., scale" in err
    assert not (tmp_path / "no").exists()


def test_nothing_is_written_over(run, tmp_path, capsys):
    filled, empty = tmp_path / "filled", tmp_path / "empty"
    filled.mkdir()
    (filled / "mine.txt").write_text("mine")
    code, _, err = call(capsys, "ckpt", "export", run, "--to", filled)
    assert code == 2
    assert "with 1 file (mine.txt). Nothing is written over" in err
    assert "verifying" not in err  # which may take long
    assert [path.name for path in filled.iterdir()] == ["mine.txt"]
    code, _, err = call(capsys, "ckpt", "export", run, "--to", filled / "mine.txt")
    assert (code, "is no folder" in err) == (2, True)
    empty.mkdir()
    (tmp_path / "link").symlink_to(empty)
    assert call(capsys, "ckpt", "export", run, "--to", tmp_path / "link")[0] == 0
    assert (empty / "model.safetensors").is_file()
    assert (tmp_path / "link").is_symlink()


def test_what_is_damaged_is_not_exported(run, tmp_path, capsys):
    path = run / "checkpoints" / "step-00000020" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    code, _, err = call(capsys, "ckpt", "export", run, "--to", tmp_path / "out")
    assert code == 8
    assert "rank-00000.safetensors is damaged" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-shard-size", "0"], "must be more than nothing"),
        (["--max-shard-size", "large"], "is not a size"),
        (["--name", "step-00000030"], "It has step-00000010, step-00000020"),
        (["--config", "nowhere.json"], "nowhere.json is missing"),
    ],
)
def test_misuse_is_told(run, tmp_path, capsys, words, message):
    code, _, err = call(capsys, "ckpt", "export", run, "--to", tmp_path / "out", *words)
    assert code == 2  # and not 8, which says that the checkpoint is damaged
    assert message in err
    assert "verifying" not in err
    assert not (tmp_path / "out").exists()


def test_memory_does_not_grow_with_the_model(tmp_path):
    """A model of 256 MiB, of which one tensor has a half, is written with far less memory."""
    state = {"large": torch.ones(2, 2**24), "w0": torch.zeros(2**24), "w1": torch.ones(2**24)}
    save_model(tmp_path / "run", 1, state)
    del state
    saved = CheckpointFolder(tmp_path / "run").open()
    model = ModelTensors(saved, dtype="BF16")
    tracemalloc.start()
    try:
        export_files(model, tmp_path / "out", config=None)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 2**26
    assert peak_bytes < 2**26
