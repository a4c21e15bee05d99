"""Children that multiprocessing spawns, and that import the script."""

import multiprocessing

import pytest

import shardwright.torch as sw
from shardwright.errors import UsageError


def test_a_worker_that_imports_the_script_again_is_no_rank(monkeypatch):
    """It has the variables of its rank: "a stranger has written them, or a rank with another secret"."""
    # As `multiprocessing.spawn` marks a child until it has imported the script.
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(UsageError, match="imports this script again, and is no rank of the run"):
        sw.init({"run_dir": "off"})
    assert not sw.is_initialized()
