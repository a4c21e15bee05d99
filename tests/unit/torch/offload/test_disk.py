"""The file on a disk that holds what units keep.

The rate at which ranks offload: measured where the planner may choose, or the settings ask for it.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mounts import SmallDisk, in_own_mounts
from shardwright.cluster import Cluster, Device, Link
from shardwright.config import Config
from shardwright.errors import UsageError
from shardwright.torch.offload import offloading
from shardwright.torch.offload.disk import DiskTier, disk_folder, is_in_memory


def content(number, num_bytes=10_000):
    return (torch.arange(num_bytes) * (number + 1)).to(torch.uint8)


@pytest.fixture
def tier(tmp_path):
    made = DiskTier(tmp_path / "below")
    yield made
    made.close()


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


CLUSTER = Cluster(
    device=Device(name="test"),
    ranks_per_node=1,
    intra_node=Link(latency_s=1e-5, bandwidth_Bps=1e9),
    inter_node=Link(latency_s=1e-5, bandwidth_Bps=1e9),
)


def a_run(**settings):
    """What `with_tier` knows of a run of one rank."""
    config = Config.parse({"run_dir": "off", **settings})
    return SimpleNamespace(
        config=config,
        device=torch.device("cpu"),
        mesh=SimpleNamespace(world_size=1),
        from_all_ranks=lambda fact: [fact],
        rank=0,
    )


@pytest.mark.parametrize("wanted", [True, "auto"])
def test_a_file_is_measured(tmp_path, monkeypatch, wanted):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    host = offloading.with_tier(a_run(offload_activations=wanted), CLUSTER).host
    assert 1e6 < host.bandwidth_Bps < 1e12
    assert 0 < host.occupancy <= 1
    assert list(tmp_path.iterdir()) == []


def test_a_tier_without_room(monkeypatch, caplog):
    def full(tier, memory):
        raise UsageError("the disk is full")

    monkeypatch.setattr(DiskTier, "write", full)
    with pytest.raises(UsageError, match="the disk is full"):
        offloading.with_tier(a_run(offload_activations=True), CLUSTER)
    assert offloading.with_tier(a_run(offload_activations="auto"), CLUSTER) is CLUSTER
    assert "nothing is offloaded: rank 0: the disk is full" in caplog.text


def test_the_slowest_rank_counts():
    link = offloading._slowest([(2e9, 0.5), (1e9, 0.2)])
    assert (link.bandwidth_Bps, link.occupancy) == (1e9, 0.5)
