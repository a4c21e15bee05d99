"""What a machine has, and what will be in the way."""

import importlib.metadata
import os

import pytest

from shardwright.observe.doctor import examine


def test_facts(tmp_path):
    ranks = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    found = examine(ranks | {"NCCL_DEBUG": "INFO", "HOME": "/root"}, folder=tmp_path)
    assert found.facts["torch"] == importlib.metadata.version("torch")
    assert found.facts["ranks"].startswith("rank 1 of 4")
    assert found.facts["$NCCL_DEBUG"] == "INFO"
    assert "$HOME" not in found.facts
    assert str(tmp_path) in found.facts["run folder"]
    assert found.faults == ()


def test_facts_for_programs_are_numbers(tmp_path):
    found = examine({"OMP_NUM_THREADS": "1"}, folder=tmp_path)
    document = found.document
    assert document["run_folder_free_bytes"] > 0
    assert document["cores"] >= document["usable_cores"] >= 1
    assert document["memory_bytes"] > document["memory_available_bytes"] > 2**20
    assert document["environment"] == {"OMP_NUM_THREADS": "1"}
    assert document["versions"]["torch"] == found.facts["torch"]


def test_secrets_are_not_shown(tmp_path):
    found = examine({"SM_API_KEY": "abc", "SHARDWRIGHT_TOKEN": "def"}, folder=tmp_path)
    assert "abc" not in str(found)
    assert "def" not in str(found)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "a run would not start: RANK is set but WORLD_SIZE is not"),
        ({"OMP_NUM_THREADS": "100000"}, "OMP_NUM_THREADS is 100000, but this process may use"),
    ],
)
def test_what_will_be_in_the_way(tmp_path, environ, message):
    found = examine(environ, folder=tmp_path)
    assert any(message in problem for problem in found.problems)
    assert found.faults == ()


def test_a_folder_that_is_not_there_yet(tmp_path):
    found = examine({}, folder=tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    assert not any("cannot be written" in problem for problem in found.problems)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path):
    tmp_path.chmod(0o500)
    assert any("cannot be written to" in problem for problem in examine({}, folder=tmp_path).problems)


def test_without_torch_nothing_can_be_trained(tmp_path, monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = examine({}, folder=tmp_path)
    assert found.faults == (
        "torch is not installed, which training needs: pip install 'shardwright[torch]'.",
    )
    assert found.faults[0] in found.problems
