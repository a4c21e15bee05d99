"""What is made to do harm is refused: also where someone has made all checksums fit."""

import json
import os
import pickle
import random
import socket
import time
import tracemalloc
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.checkpoints import Runs, save, values
from shardwright.checkpoint.disk import MANIFEST, FileEntry, Manifest
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.checkpoint.safe_files import parse
from shardwright.checkpoint.tensor_file import TensorFile
from shardwright.errors import CheckpointError, CorruptCheckpointError

pytestmark = pytest.mark.usefixtures("in_time")

NAME = "step-00000002"
FILES = [MANIFEST, "tensors.json", "state.json", "rank-00000.safetensors", "rank-00001.safetensors"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(tmp_path / "checkpoints", 1)
    save(tmp_path / "checkpoints", 2)
    return tmp_path / "checkpoints"


def _load(root: Path) -> None:
    """Reads all there is, as those who resume do: each verifies only some of the files."""
    saved = CheckpointFolder(root).open(verify=False)
    saved.check()
    saved.document("state.json")
    for name in saved.index.tensors:
        for overlap in saved.whole(name):
            assert overlap.stored.data is not None
    saved.manifest.check(saved.path)


def _seal(root: Path) -> None:
    """Makes all checksums fit what is there."""
    folder = root / NAME
    files = {
        path.name: FileEntry(size=path.stat().st_size, sha256=sha256(path.read_bytes()).hexdigest())
        for path in folder.iterdir()
        if path.name != MANIFEST
    }
    (folder / MANIFEST).write_bytes(Manifest(step=2, files=files).sealed().to_bytes())


def _fifo(path: Path, elsewhere: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path, elsewhere: Path) -> None:
    made = socket.socket(socket.AF_UNIX)
    try:
        made.bind(os.path.relpath(path))  # such names are short
    finally:
        made.close()


def _folder(path: Path, elsewhere: Path) -> None:
    path.mkdir()


def _link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def _link_to_device(path: Path, elsewhere: Path) -> None:
    path.symlink_to("/dev/zero")


def _link_to_itself(path: Path, elsewhere: Path) -> None:
    path.symlink_to(path.name)


def _device(path: Path, elsewhere: Path) -> None:
    try:
        os.mknod(path, 0o666 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("only root makes devices")


_THINGS = [_fifo, _socket, _folder, _link, _link_to_device, _link_to_itself, _device]


@pytest.mark.parametrize("make", _THINGS)
@pytest.mark.parametrize("name", FILES)
def test_only_files_are_opened(
    root: Path, name: str, make: Callable[[Path, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root / NAME / name
    monkeypatch.chdir(path.parent)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    make(path, elsewhere)
    with pytest.raises(CorruptCheckpointError, match=f"{Path(name).name} is (a link|no regular file)"):
        _load(root)


def test_a_folder_that_is_a_link_is_refused_and_never_cleared(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (root / NAME).rename(elsewhere)
    (root / NAME).symlink_to(elsewhere)
    with pytest.raises(CorruptCheckpointError, match=f"{NAME} is a link"):
        _load(root)
    (root / NAME).unlink()
    elsewhere.rename(root / NAME)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").write_text("mine")
    (root / "step-00000009.tmp-00ff").symlink_to(mine)
    (root / "step-00000009.tmp-01ff").mkdir()
    assert CheckpointFolder(root).collect(keep=1) == ("step-00000001", "step-00000009.tmp-01ff")
    assert (mine / "file").read_text() == "mine"


@pytest.mark.parametrize("name", FILES)
def test_enormous_files_take_no_memory(root: Path, name: str) -> None:
    with (root / NAME / name).open("r+b") as file:
        file.truncate(2**40)
    begin_s = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match=Path(name).name):
            _load(root)
        assert tracemalloc.get_traced_memory()[1] < 2**27
    finally:
        tracemalloc.stop()
    assert time.monotonic() - begin_s < 30


@pytest.mark.parametrize("name", FILES[1:])
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_pickles_are_not_loaded(root: Path, name: str, how: str, tmp_path: Path) -> None:
    path, marker = root / NAME / name, tmp_path / "executed"
    if how == "pickle":
        path.write_bytes(pickle.dumps(Runs(marker)))
    else:
        torch.save({"weight": Runs(marker)}, path)
    _seal(root)
    with pytest.raises(CorruptCheckpointError, match=name):
        _load(root)
    assert not marker.exists()


_INDICES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a file outside": (lambda piece: piece.update(file="../../../etc/passwd"), "which is not there"),
    "an absolute path": (lambda piece: piece.update(file="/etc/passwd"), "which is not there"),
    "the manifest": (lambda piece: piece.update(file="manifest.json"), "which is not there"),
    "a tensor that is not there": (lambda piece: piece.update(key="nothing"), "which is not there"),
    "an offset out of range": (lambda piece: piece.update(offset=[2**62, 0]), "do not make up"),
    "a negative offset": (lambda piece: piece.update(offset=[-1, 0]), "cannot be used"),
    "an overlap": (lambda piece: piece.update(offset=[3, 0]), "do not make up"),
    "an offset of other dimensions": (lambda piece: piece.update(offset=[0]), "do not make up"),
    "a fraction": (lambda piece: piece.update(offset=[0.5, 0]), "cannot be used"),
    "no number": (lambda piece: piece.update(offset=[float("nan"), 0]), "cannot be used"),
    "infinity": (lambda piece: piece.update(shape=[float("inf"), 4]), "cannot be used"),
    "a huge shape": (lambda piece: piece.update(shape=[2**62, 4]), "of shape"),
    "a text as a number": (lambda piece: piece.update(shape=["5", "4"]), "cannot be used"),
    "a further field": (lambda piece: piece.update(run="x"), "cannot be used"),
}


@pytest.mark.parametrize("case", _INDICES)
def test_indices_that_lead_astray_are_refused(root: Path, case: str) -> None:
    change, message = _INDICES[case]
    path = root / NAME / "tensors.json"
    document = json.loads(path.read_text())
    change(document["tensors"]["weight"]["pieces"][1])
    path.write_text(json.dumps(document))
    _seal(root)
    with pytest.raises(CorruptCheckpointError, match=message):
        _load(root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [2**62, 2**62]}, "do not make up"),
        ({"shape": []}, "do not make up"),
        ({"dtype": "PICKLE"}, "has the type 'PICKLE'"),
        ({"dtype": "F32"}, "a piece of weight is F32"),
        ({"pieces": []}, "do not make up"),
    ],
)
def test_tensors_that_are_not_what_the_index_says_are_refused(
    root: Path, change: dict[str, Any], message: str
) -> None:
    path = root / NAME / "tensors.json"
    document = json.loads(path.read_text())
    document["tensors"]["weight"].update(change)
    path.write_text(json.dumps(document))
    _seal(root)
    with pytest.raises(CorruptCheckpointError, match=message):
        _load(root)


def test_long_texts_take_time_and_memory_in_proportion() -> None:
    """The depth was found by an expression that took 120 bytes a letter, and seconds for 10,000 quotes."""
    for text in ("x" * 10**7, '\\"' * 10**6):
        content = f'{{"a": "{text}"}}'.encode()
        begin_s = time.monotonic()
        tracemalloc.start()
        try:
            assert len(parse(content, name="x.json")["a"]) == len(text.replace("\\", ""))
            assert tracemalloc.get_traced_memory()[1] < 8 * len(content)
        finally:
            tracemalloc.stop()
        assert time.monotonic() - begin_s < 10
    assert parse(b"[" * 64 + b"]" * 64, name="x.json")
    many = ",".join(f'"{number}": 1' for number in range(10**5))
    with pytest.raises(CorruptCheckpointError, match="'99999' is there twice"):
        parse(f'{{{many}, "99999": 2}}'.encode(), name="x.json")


def test_a_file_may_be_larger_than_memory(tmp_path: Path) -> None:
    """Its memory was private, for which the system wants to have as much in reserve."""
    policy = Path("/proc/sys/vm/overcommit_memory")
    if policy.exists() and policy.read_text().strip() == "2":
        pytest.skip("this system reserves memory whatever a program says")
    num_bytes = 2**42
    entry = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}
    text = json.dumps({"w": entry}).encode()
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + num_bytes)
    assert TensorFile(path)["w"].data.nbytes == num_bytes


def test_files_cut_off_anywhere_are_refused(root: Path) -> None:
    """At every byte around the boundaries of a file of tensors, at every third elsewhere."""
    for name in FILES:
        path = root / NAME / name
        content = path.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little") if name.endswith(".safetensors") else 0
        for size in {*range(0, len(content), 3), *range(9), header - 1, header, header + 1, len(content) - 1}:
            path.write_bytes(content[:size])
            with pytest.raises(CorruptCheckpointError, match=path.name):
                CheckpointFolder(root).open()
        path.write_bytes(content)
    assert values(root) == {2.0}


def test_whatever_is_changed_and_sealed_is_refused_or_read(root: Path) -> None:
    """No other error comes out than that it is damaged, whoever reads it."""
    chosen = random.Random(3)
    files = [root / NAME / name for name in FILES[1:]]
    contents = {path: path.read_bytes() for path in files}
    refused = 0
    for _ in range(250):
        path = chosen.choice(files)
        content = bytearray(contents[path])
        for _ in range(chosen.choice((1, 1, 2, 8))):
            place = chosen.randrange(len(content))
            kind = chosen.randrange(3)
            if kind == 0:
                content[place] = chosen.randrange(256)
            elif kind == 1:
                del content[place : place + chosen.randrange(1, 9)]
            else:
                content[place:place] = chosen.choice((b"0", b"[", b'"', b"-", b"1e999", b"{}", b"\0\0\0\0"))
            if not content:
                break
        path.write_bytes(content)
        _seal(root)
        try:
            _load(root)
        except CheckpointError:
            refused += 1
        path.write_bytes(contents[path])
    assert refused > 100
    _seal(root)
    assert values(root) == {2.0}
