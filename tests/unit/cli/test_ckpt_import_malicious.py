"""What is made to do harm is refused by ``shardwright ckpt import``, and nothing of it is executed."""

import collections
import io
import json
import os
import pickle
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.checkpoints import Runs
from safetensors.torch import save_file

from cli.calling import call
from shardwright.checkpoint.folder import CheckpointFolder

pytestmark = pytest.mark.usefixtures("in_time")


@pytest.fixture
def refuses(tmp_path: Path, capsys):
    """Imports what must be refused; returns what was said."""

    def refused(source: Path, *words: str) -> str:
        begin_s = time.monotonic()
        code, out, err = call(capsys, "ckpt", "import", source, "--to", tmp_path / "run", *words)
        assert code in (2, 8), err
        assert out == ""
        assert CheckpointFolder(tmp_path / "run").commits() == ()
        assert not list((tmp_path / "run").glob("step-*"))
        assert not (tmp_path / "executed").exists()
        assert time.monotonic() - begin_s < 20
        return err

    return refused


def _zip(what: object, path: Path, **options: Any) -> None:
    torch.save(what, path, **options)


def _old(what: object, path: Path) -> None:
    torch.save(what, path, _use_new_zipfile_serialization=False)


def _newer_protocol(what: object, path: Path) -> None:
    torch.save(what, path, pickle_protocol=4)


def _raw(what: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(what))


def _raw_old(what: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(what, protocol=0))


_WHERE = {
    "alone": ".pt",
    "among tensors": ".pth",
    "as a name": ".bin",
    "in an attribute": ".ckpt",
    "beside the state": ".pt",
}


@pytest.mark.parametrize("write", [_zip, _old, _newer_protocol, _raw, _raw_old])
@pytest.mark.parametrize("where", _WHERE)
def test_a_pickle_that_calls_something_is_refused_by_name(write, where, refuses, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was loaded"))
    evil = Runs(tmp_path / "executed")
    ordered = collections.OrderedDict({"w": torch.ones(2)})
    ordered.metadata = evil
    state = {
        "alone": evil,
        "among tensors": {"w": torch.ones(2), "x": evil},
        "as a name": {"w": torch.ones(2), evil: torch.ones(2)},
        "in an attribute": ordered,
        "beside the state": {"state_dict": {"w": torch.ones(2)}, "callbacks": [evil]},
    }[where]
    path = tmp_path / f"x{_WHERE[where]}"
    write(state, path)
    said = refuses(path, *(["--key", "state_dict"] if where == "beside the state" else []))
    assert f"{path} is refused: its pickle names " in said
    if write in (_zip, _old) or (where == "alone" and write is not _newer_protocol):
        assert "posix.mkdir" in said  # else what comes before it is refused already
    assert "Nothing in it was executed" in said


@pytest.mark.parametrize("kind", ["module", "script", "array", "namespace"])
def test_other_objects_are_refused_by_name(kind, refuses, tmp_path):
    import argparse

    import numpy

    path = tmp_path / "x.pt"
    if kind == "script":

        class Doubles(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return 2 * x

        with pytest.warns(DeprecationWarning, match="jit"):
            torch.jit.save(torch.jit.script(Doubles()), path)
    else:
        made = {
            "module": torch.nn.Linear(2, 2),
            "array": {"w": numpy.ones(3)},
            "namespace": {"w": torch.ones(2), "args": argparse.Namespace(lr=1)},
        }[kind]
        torch.save(made, path)
    said = refuses(path)
    expected = {
        "module": "torch.nn.modules.linear.Linear",
        "script": "it is a program in TorchScript",
        "array": "numpy",
        "namespace": "argparse.Namespace",
    }[kind]
    assert expected in said
    assert str(path) in said


def _archive(path: Path, *, compression: int = 0, again: bool = False, **files: bytes) -> Path:
    with zipfile.ZipFile(path, "w", compression=compression) as archive:
        for name, content in files.items():
            archive.writestr(f"archive/{name.replace('__', '/').replace('_pkl', '.pkl')}", content)
        if again:
            archive.writestr("other/data.pkl", files["data_pkl"])
    return path


def _pickled_tensor(*, size: tuple[int, ...], stride: tuple[int, ...], numel: int) -> bytes:
    """The pickle of a dictionary with a tensor, in a storage that claims `numel` numbers."""

    class Storage:
        pass

    class Rebuilt:
        def __reduce__(self) -> tuple[Any, ...]:
            hooks: dict[str, object] = collections.OrderedDict()
            return torch._utils._rebuild_tensor_v2, (Storage(), 0, size, stride, False, hooks)

    class Pickler(pickle.Pickler):
        def persistent_id(self, each: object) -> object:
            return ("storage", torch.FloatStorage, "0", "cpu", numel) if isinstance(each, Storage) else None

    file = io.BytesIO()
    Pickler(file, protocol=2).dump({"w": Rebuilt()})
    return file.getvalue()


def test_bombs_take_no_memory(refuses, tmp_path):
    """Files of some bytes that claim to have terabytes."""
    data = b"\0" * 64
    large = (2**40,)
    pickles = {
        "repeated": _pickled_tensor(size=large, stride=(0,), numel=4),
        "beyond": _pickled_tensor(size=large, stride=(1,), numel=4),
        "claimed": _pickled_tensor(size=large, stride=(1,), numel=2**40),
        "negative": _pickled_tensor(size=(2,), stride=(-1,), numel=4),
        "overflowing": _pickled_tensor(size=(2**40, 2**40), stride=(0, 0), numel=4),
    }
    for name, content in pickles.items():
        parts = {"data_pkl": content, "version": b"3", "data__0": data, "byteorder": b"little"}
        path = _archive(tmp_path / f"{name}.pt", **parts)
        assert f"{path} is refused" in refuses(path)
    packed = _archive(
        tmp_path / "packed.pt", compression=zipfile.ZIP_DEFLATED, data_pkl=b"\x80\x02}." + b"0" * 10**8
    )
    assert "it is compressed" in refuses(packed)
    twice = _archive(tmp_path / "twice.pt", data_pkl=b"\x80\x02}.", again=True)
    assert "has not the one pickle" in refuses(twice)
    calls = tmp_path / "calls.pt"
    calls.write_bytes(b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\0\0\0\0\x40\x85R.")
    assert "names __builtin__.bytearray" in refuses(calls)


@pytest.mark.parametrize("old", [False, True])
def test_cut_off_and_changed_files_of_pytorch_are_refused_or_read(old, tmp_path, capsys, refuses):
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(8), "v": torch.ones(3)}, path, _use_new_zipfile_serialization=not old)
    content = path.read_bytes()
    for size in range(0, len(content) - 1, max(1, len(content) // 40)):
        path.write_bytes(content[:size])
        assert str(path) in refuses(path)
    for place in range(0, len(content), max(1, len(content) // 60)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x15]) + content[place + 1 :])
        run = tmp_path / f"run-{place}"
        code, _, err = call(capsys, "ckpt", "import", path, "--to", run)
        assert code in (0, 2), err
        if code == 0:  # a plain file has no checksum of its own
            CheckpointFolder(run).open().check()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an index and one file, as it should be."""
    made = tmp_path / "source"
    made.mkdir()
    save_file({"w": torch.ones(2)}, made / "model-1.safetensors")
    save_file({"w": torch.ones(2)}, tmp_path / "outside.safetensors")
    _index(made, {"w": "model-1.safetensors"})
    return made


def _index(folder: Path, places: object, name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "./model-1.safetensors",
        "../../../../etc/passwd",
        "/etc/passwd",
        "/dev/zero.safetensors",
        "sub/model-1.safetensors",
        "..",
        "",
        ".safetensors",
        "x\0y.safetensors",
        "a" * 300 + ".safetensors",
        "model-1.bin",
        "file:///etc/passwd.safetensors",
    ],
)
def test_an_index_leads_nowhere_else(name, folder, tmp_path, refuses):
    _index(folder, {"w": name})
    said = refuses(folder)
    assert "is no name of a file in" in said or "leads to" in said
    assert f"{name[:100]!r}"[1:-1] in said
    absolute = str(tmp_path / "outside.safetensors")
    _index(folder, {"w": absolute})
    assert "is no name of a file in" in refuses(folder)
    _index(folder, {"w": name}, "pytorch_model.bin.index.json")
    said = refuses(folder / "pytorch_model.bin.index.json")
    assert "is none of .pt, .pth, .bin, .ckpt" in said or name == "model-1.bin"


@pytest.mark.parametrize("name", ["model-1.safetensors", "model.safetensors.index.json", "config.json"])
@pytest.mark.parametrize("kind", ["link", "link to a device", "pipe", "folder", "huge"])
def test_only_files_are_read(name, kind, folder, tmp_path, refuses):
    path, outside = folder / name, tmp_path / "outside"
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text("{}")
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(2**40)
    said = refuses(folder)
    assert name in said
    expected = {"pipe": "is no regular file", "folder": "is no regular file", "huge": "are read"}
    if (name, kind) == ("model-1.safetensors", "huge"):  # of such a file only the header is read: it has none
        expected["huge"] = "is no JSON"
    assert expected.get(kind, "Links are not followed") in said


@pytest.mark.parametrize(
    ("header", "length", "message"),
    [
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 2**62, "its header claims"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 2**64 - 1, "its header claims"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [2**62, 2**62 + 8]}}, None, "has the shape"),
        ({"w": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 8]}}, None, "has the shape"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, None, "has -8 bytes"),
        ({"w": {"dtype": "F32", "shape": [float("nan")], "data_offsets": [0, 8]}}, None, "has the shape"),
        ({"w": {"dtype": "F32", "shape": [1e308], "data_offsets": [0, 8]}}, None, "has the shape"),
        (
            {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "vw"},
            None,
            "begins at 0, and not at 8",
        ),
        ({"w": {"dtype": "F32", "shape": [1] * 70, "data_offsets": [0, 4]}}, None, "file has 8 for them"),
        ({}, None, "file has 8 for them"),
    ],
)
def test_hostile_headers_are_refused(header, length, message, tmp_path, refuses):
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + b"\0" * 8)
    assert message in refuses(path)
