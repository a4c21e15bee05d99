"""The Trainer with what its examples use: LoRA, recomputation, callbacks, the best model, resuming."""

import shutil

import pytest
from scripts_of_others import alone, over_ranks

pytest.importorskip("accelerate")
pytest.importorskip("peft")
SCRIPT = "whole_trainer.py"
STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2}
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "total_flos", "test_loss")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return alone(SCRIPT, cwd=tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("staged")
    return folder, over_ranks(SCRIPT, cwd=folder, settings=STAGES)


def compare(report, expected):
    """Of a run of the Trainer, and of the best model, which is loaded at its end."""
    assert len(report["history"]) == len(expected["history"]) > 10
    for ours, theirs in zip(report["history"], expected["history"], strict=True):
        names = [name for name in LOGGED if name in theirs]
        assert [ours[name] for name in names] == pytest.approx([theirs[name] for name in names], rel=3e-6)
    assert report["predicted"] == pytest.approx(expected["predicted"], rel=1e-5)
    assert report["files"] == expected["files"]


def test_an_adapter_trains_over_stages_as_in_one_process(plain, staged):
    """The best model of an adapter was not loaded: its file has another name; work was counted by ranks."""
    compare(staged[1], plain)
    assert staged[1]["called"] == plain["called"]


def test_a_run_of_two_stages_is_resumed_on_one_rank(plain, staged, tmp_path):
    checkpoint = shutil.copytree(staged[0] / "output/checkpoint-4", tmp_path / "output/checkpoint-4")
    compare(over_ranks(SCRIPT, "--resume", checkpoint, cwd=tmp_path, settings={}, num_ranks=1), plain)
