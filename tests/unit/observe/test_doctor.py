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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path):
    tmp_path.chmod(0o500)
    assert any("cannot be written to" in problem for problem in examine({}, folder=tmp_path).problems)
