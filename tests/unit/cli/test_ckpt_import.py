"""``shardwright ckpt import``: what other libraries have saved becomes a checkpoint."""

import collections
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from checkpoint.models import save_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cli.calling import call
from shardwright.checkpoint.folder import CheckpointFolder

_HALVES = (("a.weight", "a.bias"), ("b.weight", "count", "empty"))


def _state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "a.weight": torch.randn(6, 4, generator=generator).t().contiguous(),
        "a.bias": torch.randn(4, generator=generator).to(torch.bfloat16),
        "b.weight": torch.randn(3, 4, generator=generator),
        "count": torch.tensor(7),
        "empty": torch.zeros(2, 0),
    }


def _folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "gpt2"}')
    return path


def _hugging_face(path: Path) -> Path:
    save_file(_state(), _folder(path) / "model.safetensors", metadata={"format": "pt"})
    return path


def _indexed(path: Path, base: str, ending: str, save: Callable[[dict[str, Tensor], Path], object]) -> Path:
    places = {}
    for number, names in enumerate(_HALVES, start=1):
        file = f"{base}-{number:05}-of-00002{ending}"
        save({name: _state()[name] for name in names}, path / file)
        places |= dict.fromkeys(names, file)
    index = path / f"{base}{ending}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return index


def _sharded(path: Path) -> Path:
    _indexed(_folder(path), "model", ".safetensors", save_file)
    return path


def _sharded_index(path: Path) -> Path:
    return _indexed(_folder(path), "model", ".safetensors", save_file)


def _in_cache(path: Path) -> Path:
    """As the cache of Hugging Face has it: links to where the contents are."""
    snapshot = path / "models--x--y" / "snapshots" / "0abc"
    (path / "models--x--y" / "blobs").mkdir(parents=True)
    snapshot.parent.mkdir()
    _sharded(snapshot)
    for number, file in enumerate(list(snapshot.iterdir())):
        blob = path / "models--x--y" / "blobs" / f"{number:040}"
        file.rename(blob)
        file.symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def _one_file(path: Path) -> Path:
    save_file(_state(), path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def _linked_file(path: Path) -> Path:
    """What the user names may be a link: to where it leads is the user's affair."""
    path.with_suffix(".safetensors").symlink_to(_one_file(path.with_name("real")))
    return path.with_suffix(".safetensors")


def _other_name(path: Path) -> Path:
    save_file(_state(), _folder(path) / "consolidated.safetensors")
    return path


def _pt(path: Path) -> Path:
    torch.save(_state(), path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def _old_bin(path: Path) -> Path:
    ordered = collections.OrderedDict(_state())
    torch.save(ordered, _folder(path) / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return path


def _sharded_bin(path: Path) -> Path:
    _indexed(_folder(path), "pytorch_model", ".bin", torch.save)
    return path


def _of_a_module(path: Path) -> Path:
    """With parameters, and what `state_dict` has beside tensors: versions, in an attribute."""
    module = nn.Module()
    for name, tensor in _state().items():
        inner = module
        for part in name.split(".")[:-1]:
            if not hasattr(inner, part):
                setattr(inner, part, nn.Module())
            inner = getattr(inner, part)
        last = name.rpartition(".")[2]
        if tensor.is_floating_point():
            setattr(inner, last, nn.Parameter(tensor))
        else:
            inner.register_buffer(last, tensor)
    torch.save(module.state_dict(keep_vars=True), path.with_suffix(".pth"))
    return path.with_suffix(".pth")


_SOURCES = [
    _hugging_face, _sharded, _sharded_index, _in_cache, _one_file, _linked_file, _other_name, _pt, _old_bin,
    _sharded_bin, _of_a_module,
]  # fmt: skip


def _same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


def _import(capsys, source, to, *words):
    return call(capsys, "ckpt", "import", source, "--to", to, *words)


@pytest.mark.parametrize("make", _SOURCES)
def test_what_is_imported_is_exported_again(make, tmp_path, capsys):
    source = make(tmp_path / "source")
    code, out, err = _import(capsys, source, tmp_path / "run", "--step", 12)
    assert code == 0, err
    assert out.startswith("wrote 5 tensors (160 B) to ")
    assert "step-00000012" in out
    assert call(capsys, "ckpt", "verify", tmp_path / "run")[:2] == (0, "step-00000012  ok\n")
    assert call(capsys, "ckpt", "export", tmp_path / "run", "--to", tmp_path / "out")[0] == 0
    _same(load_file(tmp_path / "out" / "model.safetensors"), _state())
    has_config = (tmp_path / "out" / "config.json").exists()
    assert has_config == (source.is_dir() or source.name.endswith(".json"))


@pytest.mark.parametrize("dtype", [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float16,
    torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
])  # fmt: skip
def test_tensors_of_every_type(dtype, tmp_path, capsys):
    state = {"w": torch.tensor([0.0, 1.0, 1.0]).to(dtype)}
    torch.save(state, tmp_path / "x.pt")
    assert _import(capsys, tmp_path / "x.pt", tmp_path / "run")[0] == 0
    words = ["--to", tmp_path / "out", "--format", "state_dict"]
    assert call(capsys, "ckpt", "export", tmp_path / "run", *words)[0] == 0
    found = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert found["w"].dtype == dtype
    assert torch.equal(found["w"].view(torch.uint8), state["w"].view(torch.uint8))


def test_names_are_changed_as_asked(tmp_path, capsys):
    wrapped = {f"module.{name}": tensor for name, tensor in _state().items()}
    save_file(wrapped, tmp_path / "x.safetensors")
    words = ["--strip", "module.", "--prefix", "model."]
    code, _, _ = _import(capsys, tmp_path / "x.safetensors", tmp_path / "run", *words)
    assert code == 0
    index = CheckpointFolder(tmp_path / "run").open().index
    assert set(index.tensors) == {f"model/model.{name}" for name in _state()}
    save_file(wrapped | {"scale": torch.ones(1)}, tmp_path / "y.safetensors")
    code, _, err = _import(capsys, tmp_path / "y.safetensors", tmp_path / "b", *words)
    assert code == 2
    assert "1 of 6 tensors" in err
    assert "have no prefix 'module.': scale" in err


def test_a_tensor_with_two_names_is_stored_once_and_has_both(tmp_path, capsys):
    weight = torch.randn(100, 10)
    state = {"embedding": weight, "head": weight, "part": weight[:50], "copy": weight.clone()}
    torch.save(state, tmp_path / "x.pt")
    assert _import(capsys, tmp_path / "x.pt", tmp_path / "run")[0] == 0
    saved = CheckpointFolder(tmp_path / "run").open()
    saved.check()
    assert 10_000 < saved.num_bytes < 14_000
    pieces = {name: entry.pieces for name, entry in saved.index.tensors.items()}
    assert pieces["model/embedding"] == pieces["model/head"]
    assert call(capsys, "ckpt", "export", tmp_path / "run", "--to", tmp_path / "out")[0] == 0
    _same(load_file(tmp_path / "out" / "model.safetensors"), state)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "'x' (int)"),
        (torch.eye(3).to_sparse(), "names torch._utils._rebuild_sparse_tensor"),
        (torch.ones(3, device="meta"), "_rebuild_meta_tensor_no_storage"),
        ([torch.ones(1)], "'x' (list)"),
        ({1, 2}, "set"),
    ],
)
def test_other_things_than_plain_tensors_are_told(value, message, tmp_path, capsys):
    torch.save({"w": torch.ones(1), "x": value}, tmp_path / "x.pt")
    code, _, err = _import(capsys, tmp_path / "x.pt", tmp_path / "run")
    assert code == 2
    assert str(tmp_path / "x.pt") in err
    assert message in err
    assert CheckpointFolder(tmp_path / "run").commits() == ()


def test_folders_that_are_in_use_are_left_alone(tmp_path, capsys):
    source = _one_file(tmp_path / "source")
    save_model(tmp_path / "run" / "checkpoints", 40, _state())
    code, _, err = _import(capsys, source, tmp_path / "run")
    assert code == 2
    assert "has 1 checkpoint, the newest of step 40" in err
    (tmp_path / "held").mkdir()
    script = (
        "import sys, pathlib; from shardwright.observe.run_folder import hold;"
        "assert hold(pathlib.Path(sys.argv[1])) is None; print(flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", script, tmp_path / "held" / ".lock"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        code, _, err = _import(capsys, source, tmp_path / "held")
    assert code == 2
    assert f"is in use by process {holder.pid}" in err


def test_what_is_no_model_is_told(tmp_path, capsys):
    empty, several, both = tmp_path / "empty", tmp_path / "several", tmp_path / "notes.txt"
    for path in (empty, several):
        path.mkdir()
    for name in ("x.safetensors", "y.safetensors"):
        save_file(_state(), several / name)
    both.write_text("hello")
    save_file({}, tmp_path / "none.safetensors")
    save_model(tmp_path / "run", 1, _state())
    for source, message in {
        tmp_path / "nothing": "there is no ",
        empty: "has no file of tensors: none of model.safetensors",
        several: "several files that could be the model: x.safetensors, y.safetensors",
        both: "does not say what it is",
        tmp_path / "none.safetensors": "the model has no tensors",
        tmp_path / "run" / "step-00000001": "is a checkpoint of Shardwright already",
    }.items():
        code, _, err = _import(capsys, source, tmp_path / "out")
        assert code == 2, err
        assert message in err
        assert CheckpointFolder(tmp_path / "out").commits() == ()
        assert not list(tmp_path.glob("out/step-*"))
    code, _, err = _import(capsys, _one_file(tmp_path / "a"), tmp_path / "b", "--key", "m")
    assert (code, "have no keys but names" in err) == (2, True)
