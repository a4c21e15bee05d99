"""What Accelerate's quickstart and its examples of checkpoints call: LoRA, recomputation, counted labels.

All parameters train in `scripts_of_accelerate`, whose losses are compared, too.
"""

import pytest
import torch
from scripts_of_others import alone, over_ranks

from shardwright.testing import RanksFailedError, run_ranks

pytest.importorskip("accelerate")
pytest.importorskip("peft")
SCRIPT = "whole_accelerate.py"
STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2}
COUNTED = ("accuracy", "evaluated", "rate")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return alone(SCRIPT, "--lora", cwd=tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("staged")
    return folder, over_ranks(SCRIPT, "--lora", cwd=folder, settings=STAGES)


def compare(report, expected):
    last = len(report["losses"])
    assert report["losses"] == pytest.approx(expected["losses"][-last:], abs=3e-6)
    assert report["norms"] == pytest.approx(expected["norms"][-len(report["norms"]) :], rel=1e-4)
    for name in COUNTED:
        assert report[name] == pytest.approx(expected[name]), name


def test_two_stages_train_and_evaluate_like_one_process(plain, staged):
    """The last batches, of training and of the evaluation, are half of the others."""
    compare(staged[1], plain)


def test_the_saved_files_are_those_of_one_process(plain, staged):
    names = [name for name in plain["files"] if not name.startswith("state/")]
    assert set(names) == {"model/model.safetensors", "pretrained/adapter_model.safetensors"} | set(names)
    assert set(names) <= set(staged[1]["files"])


def test_a_state_of_two_ranks_with_a_scheduler_loads_on_one(plain, staged, tmp_path):
    """`save_state` failed whenever a scheduler was prepared: its name began with an underscore."""
    state = staged[0] / "output/state"
    report = over_ranks(SCRIPT, "--lora", "--resume", state, cwd=tmp_path, settings={}, num_ranks=1)
    assert len(report["losses"]) == len(plain["losses"]) - 2
    compare(report, plain)


def _loaded(folder):
    from shardwright.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True, config={"profile": "estimated", "run_dir": "off", "microbatches": 2})
    accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    accelerator.load_state(folder)


def test_a_state_of_plain_accelerate_is_refused_and_named(tmp_path):
    """`load_state` of its folder, or of an empty one, loaded nothing and said nothing."""
    with pytest.raises(RanksFailedError, match=r"no state of this Accelerator is there\. accelerator\.save"):
        run_ranks(_loaded, 2, str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(RanksFailedError, match=r"plain Accelerate.*safetensors\.torch\.load_file\("):
        run_ranks(_loaded, 2, str(tmp_path))
