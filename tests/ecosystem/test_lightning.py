"""Lightning's strategy: an unedited script, told the strategy's name, trains as in one process."""

import csv

import numpy as np
import pytest
import torch
from scripts_of_others import alone, over_ranks

pytest.importorskip("lightning")
SCRIPT = "whole_lightning.py"
STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2}


def table(folder):
    with (folder / "output/log/version_0/metrics.csv").open() as file:
        return [{name: float(each) for name, each in row.items() if each} for row in csv.DictReader(file)]


def test_two_stages_train_and_evaluate_like_one_process(tmp_path):
    """Hyperparameters, loggers, callbacks, clipping by value, a schedule of steps, test, predict, loading.

    The last batch of an epoch is half of the others.
    """
    one, two = (tmp_path / name for name in ("one", "two"))
    for folder in (one, two):
        folder.mkdir()
    expected = alone(SCRIPT, cwd=one)
    report = over_ranks(SCRIPT, "--strategy", "shardwright", cwd=two, settings=STAGES)
    assert report["files"] == expected["files"]
    for name in ("tested", "best"):
        assert report[name] == pytest.approx(expected[name], abs=1e-6), name
    for name in ("predicted", "loaded"):
        assert np.allclose(report[name], expected[name], atol=1e-6), name
    ours, theirs = table(two), table(one)
    assert len(ours) == len(theirs) > 20
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(wanted, abs=1e-6)
    states = [torch.load(each / "output/last.ckpt", weights_only=True)["state_dict"] for each in (two, one)]
    torch.testing.assert_close(*states, rtol=0, atol=1e-5)
