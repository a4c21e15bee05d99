"""Whatever is changed in a committed checkpoint, it is refused by name."""

import json
import random
import shutil
from pathlib import Path

import pytest

from checkpoint.checkpoints import save, values
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.checkpoint.tensor_file import TensorFile
from shardwright.errors import CheckpointError, CorruptCheckpointError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(tmp_path / "checkpoints", 1)
    save(tmp_path / "checkpoints", 2)
    return tmp_path / "checkpoints"


def test_200_flipped_bytes_are_refused(root: Path) -> None:
    chosen = random.Random(0)
    files = [*sorted((root / "step-00000002").iterdir())]
    for _ in range(200):
        path = chosen.choice(files)
        content = path.read_bytes()
        place, flip = chosen.randrange(len(content)), chosen.randrange(1, 256)
        path.write_bytes(content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :])
        with pytest.raises(CorruptCheckpointError, match=path.name):
            CheckpointFolder(root).open()
        path.write_bytes(content)
    assert values(root) == {2.0}


def test_missing_foreign_and_swapped_files_are_refused(root: Path) -> None:
    newest = root / "step-00000002"
    (newest / "extra.bin").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match=r"extra\.bin does not belong"):
        CheckpointFolder(root).open()
    (newest / "extra.bin").unlink()
    shutil.copy(root / "step-00000001" / "rank-00000.safetensors", newest)
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.safetensors is damaged"):
        CheckpointFolder(root).open()
    (newest / "rank-00000.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.safetensors is missing"):
        CheckpointFolder(root).open()


def test_a_manifest_of_another_checkpoint_is_refused(root: Path) -> None:
    shutil.copy(root / "step-00000001" / "manifest.json", root / "step-00000002")
    with pytest.raises(CorruptCheckpointError, match="is of step 1"):
        CheckpointFolder(root).open()


def test_a_run_that_went_back_has_the_newest_checkpoint(root: Path) -> None:
    """Steps alone do not tell: a run resumed from an older checkpoint saves lower steps later."""
    save(root, 5)
    for step in (3, 4):
        save(root, step)
    names = [commit.name for commit in CheckpointFolder(root).commits()]
    assert names == [*(f"step-0000000{step}" for step in (1, 2, 5)), "step-00000003.2", "step-00000004.2"]
    assert values(root) == {4.0}


def test_checkpoints_of_the_first_version_are_read(root: Path) -> None:
    """Their manifests have no checksum of their own; a list beside them, which is not needed, had it."""
    path = root / "step-00000002" / "manifest.json"
    document = json.loads(path.read_text())
    del document["sha256"]
    path.write_text(json.dumps({**document, "version": 1}))
    (root / "COMMITTED").write_text("{}")
    assert values(root) == {2.0}


def test_old_checkpoints_stay_where_the_newest_is_damaged(root: Path) -> None:
    path = root / "step-00000002" / "state.json"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(CorruptCheckpointError, match=r"state\.json"):
        CheckpointFolder(root).collect(keep=1)
    assert (root / "step-00000001").is_dir()
    assert len(CheckpointFolder(root).commits()) == 2


def _tensor_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> TensorFile:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return TensorFile(path)


def _entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "length", "message"),
    [
        ({"a": _entry()}, 2**62, "its header claims"),
        (b"[" * 100_000, None, "nested more than 64 deep"),
        (b"[" * 65 + b"]" * 65, None, "nested more than 64 deep"),
        (b'{"a": 1, "a": 2}', None, "'a' is there twice"),
        (b"\xff\xfe", None, "is no JSON"),
        ([], None, "its header is no object"),
        ({"a": 3}, None, "is not described"),
        ({"a": _entry(dtype="PICKLE")}, None, "has the type 'PICKLE'"),
        ({"a": _entry(shape=[2**62])}, None, "has the shape"),
        ({"a": _entry(shape=[-1])}, None, "has the shape"),
        ({"a": _entry(shape=[True])}, None, "has the shape"),
        ({"a": _entry(shape=[2])}, None, "has 4 bytes for F32"),
        ({"a": _entry(offsets=[4, 8])}, None, "begins at 4, and not at 0"),
        ({"a": _entry(), "b": _entry()}, None, "begins at 0, and not at 4"),
        ({}, None, "its tensors have 0 bytes, and the file has 4"),
    ],
)
def test_malicious_tensor_files_are_refused(
    tmp_path: Path, header: object, length: int | None, message: str
) -> None:
    with pytest.raises(CorruptCheckpointError, match=message):
        _tensor_file(tmp_path / "x.safetensors", header, b"\0" * 4, length)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "a/b", "..", ".hidden", "", "manifest.json", "x\0y", "a" * 300]
)
def test_files_outside_of_the_folder_are_not_read(root: Path, name: str) -> None:
    """Even where someone has made all checksums fit."""
    from shardwright.checkpoint.disk import Manifest

    text = (root / "step-00000002" / "manifest.json").read_text()
    document = json.loads(text)
    document["files"][name] = document["files"]["state.json"]
    with pytest.raises(CorruptCheckpointError, match="no name of a file"):
        Manifest.from_bytes(json.dumps(document).encode(), name="manifest.json")


def test_a_newer_format_is_told(root: Path) -> None:
    path = root / "step-00000002" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))
    with pytest.raises(CorruptCheckpointError, match="version 99 of the format"):
        CheckpointFolder(root).open()


def test_the_order_of_a_run_of_format_1_that_went_back_is_asked_for(root: Path) -> None:
    """Its list had the checkpoint of step 1 behind that of step 2; their names do not."""
    listed = {"checkpoints": [{"name": f"step-{step:08}", "step": step} for step in (2, 1)]}
    (root / "COMMITTED").write_text(json.dumps(listed))
    folder = CheckpointFolder(root)
    with pytest.raises(CheckpointError, match=r"step-00000001 was saved later.*resume\(.step-00000001.\)"):
        folder.open()
    with pytest.raises(CheckpointError, match="was saved later"):
        folder.collect(keep=1)
    assert folder.open("step-00000001").manifest.step == 1
    save(root, 2)
    assert folder.open().path.name == "step-00000002.2"


def test_only_folders_are_checkpoints(root: Path) -> None:
    for name in ("step-00000003", "step-00000003.tmp-00ff"):
        (root / name).write_bytes(b"")
    folder = CheckpointFolder(root)
    assert folder.open().manifest.step == 2
    assert folder.collect(keep=1) == ("step-00000001",)
