"""The file on a disk that holds what units keep."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from mounts import SmallDisk, in_own_mounts
from shardwright.errors import UsageError
from shardwright.torch.offload.disk import DiskTier, disk_folder, is_in_memory


def content(number, num_bytes=10_000):
    return (torch.arange(num_bytes) * (number + 1)).to(torch.uint8)


@pytest.fixture
def tier(tmp_path):
    made = DiskTier(tmp_path / "below")
    yield made
    made.close()


def test_bytes_come_back(tier):
    written = [content(n, 5_000 * (n + 1)) for n in range(4)]
    places = [tier.write(memory)[0] for memory in written]
    back = [torch.empty_like(memory) for memory in written]
    for copy in [tier.read(place, memory) for place, memory in zip(places, back, strict=True)]:
        copy.wait()
        begin_s, end_s = copy.seconds()
        assert begin_s <= end_s
    assert all(map(torch.equal, written, back))


def test_places_are_used_again(tier):
    """A batch is like the one before; one of other shapes starts anew."""
    places = [tier.write(content(n))[0] for n in range(3)]
    tier.free(places[1])
    again, copy = tier.write(content(7))
    assert again == places[1]
    memory = torch.empty(10_000, dtype=torch.uint8)
    tier.read(again, memory).wait()
    assert torch.equal(memory, content(7))
    for place in (places[0], places[2], again):
        tier.free(place)
    other, copy = tier.write(content(0, 20_000))
    copy.wait()
    assert other.offset == 0


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"offloaded to .*file/below.* Set TMPDIR to a folder"):
        DiskTier(tmp_path / "file" / "below").write(content(0))


def test_a_read_that_fails_is_told_to_who_waits(tier):
    place, copy = tier.write(content(0))
    copy.wait()
    os.ftruncate(tier._file.fileno(), 100)
    with pytest.raises(UsageError, match=r"cannot be copied: .*ends too early.* Set TMPDIR"):
        tier.read(place, torch.empty(10_000, dtype=torch.uint8)).wait()


def fill_a_small_disk(folder):
    disk = SmallDisk(folder, 64 * 4096)
    tier = DiskTier(folder)
    places = [tier.write(content(n, 50_000))[0] for n in range(4)]
    tier.write(content(4, 40_000))
    with pytest.raises(UsageError, match=r"which has no room for 300.0 KiB \(No space left .* are free\)"):
        tier.write(content(5, 50_000))
    for place in places:
        tier.free(place)
    memory = torch.empty(50_000, dtype=torch.uint8)
    place, _ = tier.write(content(9, 50_000))
    tier.read(place, memory).wait()
    assert torch.equal(memory, content(9, 50_000))
    tier.close()
    assert disk.free_bytes > 50 * 4096


def test_a_disk_without_room_is_one_clear_error(tmp_path, capabilities):
    if not capabilities["mounts"]:
        pytest.skip("this process cannot mount file systems")
    in_own_mounts(lambda: fill_a_small_disk(tmp_path))


def test_a_process_that_is_killed_leaves_nothing(tmp_path):
    script = f"""
        import os, signal, torch
        from pathlib import Path
        from shardwright.torch.offload.disk import DiskTier
        tier = DiskTier(Path({str(tmp_path)!r}))
        tier.write(torch.ones(10_000, dtype=torch.uint8))[1].wait()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert ended.returncode == -9
    assert list(tmp_path.iterdir()) == []


def test_the_folder(tmp_path, monkeypatch, caplog):
    from shardwright.config import Config

    monkeypatch.setattr("tempfile.gettempdir", lambda: "/temporary")
    memory = {"/temporary"}
    monkeypatch.setattr("shardwright.torch.offload.disk.is_in_memory", lambda folder: str(folder) in memory)
    runs = Config.parse({"run_dir": str(tmp_path / "runs")})
    assert disk_folder(runs, warns=True) == tmp_path / "runs"  # not in memory, as /temporary is
    memory.clear()
    assert str(disk_folder(runs, warns=True)) == "/temporary"
    assert not caplog.records
    memory |= {"/temporary", str(tmp_path / "runs")}
    assert str(disk_folder(runs, warns=True)) == "/temporary"
    assert "which is in memory itself" in caplog.text


def small_disks_are_in_memory(folder):
    SmallDisk(folder, 16 * 4096)
    assert is_in_memory(folder / "not" / "there")
    assert not is_in_memory(Path("/proc"))


def test_a_file_system_in_memory_is_known(tmp_path, capabilities):
    if not capabilities["mounts"]:
        pytest.skip("this process cannot mount file systems")
    (tmp_path / "small").mkdir()
    in_own_mounts(lambda: small_disks_are_in_memory(tmp_path / "small"))
