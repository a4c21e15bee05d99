"""Lightning's strategy: an unedited script, told the strategy's name, trains as in one process."""

import csv

import numpy as np
import pytest
from scripts_of_others import alone, over_ranks

pytest.importorskip("lightning")
SCRIPT = "autoencoder.py"
STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return alone(SCRIPT, cwd=tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("staged")
    return folder, over_ranks(SCRIPT, "--strategy", "shardwright", cwd=folder, settings=STAGES)


def test_two_stages_train_and_evaluate_like_one_process(plain, staged):
    report = staged[1]
    assert report["losses"] == pytest.approx(plain["losses"], abs=1e-6)
    assert report["evaluation"] == pytest.approx(plain["evaluation"], abs=1e-6)


def test_the_checkpoint_loads_in_one_process(staged):
    import torch

    checkpoint = torch.load(staged[0] / "output/last.ckpt", weights_only=True)
    assert "encoder.0.weight" in checkpoint["state_dict"]


def table(folder):
    with (folder / "output/log/version_0/metrics.csv").open() as file:
        return [{name: float(each) for name, each in row.items() if each} for row in csv.DictReader(file)]


def test_what_its_examples_use_is_as_in_one_process(tmp_path):
    """Hyperparameters, loggers, callbacks, clipping by value, a schedule of steps, test, predict, loading."""
    script, one, two = "whole_lightning.py", tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    expected = alone(script, cwd=one)
    report = over_ranks(script, "--strategy", "shardwright", cwd=two, settings=STAGES)
    assert report["files"] == expected["files"]
    assert report["tested"] == pytest.approx(expected["tested"], abs=1e-6)
    for name in ("predicted", "loaded"):
        assert np.allclose(report[name], expected[name], atol=1e-6), name
    ours, theirs = table(two), table(one)
    assert len(ours) == len(theirs) > 20
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(wanted, abs=1e-6)


@pytest.mark.sweep
def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_ended(staged, tmp_path):
    [checkpoint] = (staged[0] / "output/checkpoints").glob("*.ckpt")
    arguments = ("--strategy", "shardwright", "--ckpt_path", checkpoint, "--max_epochs", "3")
    resumed = over_ranks(SCRIPT, *arguments, cwd=tmp_path, settings=STAGES)
    whole = over_ranks(SCRIPT, *arguments[:2], *arguments[4:], cwd=tmp_path, settings=STAGES)
    assert resumed["losses"] == pytest.approx(whole["losses"][-len(resumed["losses"]) :], abs=1e-6)
