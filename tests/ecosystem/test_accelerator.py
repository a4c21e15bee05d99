"""Accelerate's loop over stages and replicas: an unedited script trains as in one process."""

import pytest
import torch
from scripts_of_others import alone, over_ranks

from shardwright.testing import RanksFailedError, run_ranks

pytest.importorskip("accelerate")
SCRIPT = "no_trainer.py"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return alone(SCRIPT, cwd=tmp_path_factory.mktemp("plain"))


def test_two_stages_train_and_evaluate_like_one_process(plain, tmp_path):
    """The last batch of an epoch is half of the others, and its microbatches, too."""
    settings = {"pipeline_parallel_degree": 2, "microbatches": 2}
    report = over_ranks(SCRIPT, cwd=tmp_path, settings=settings)
    for name in plain:
        assert report[name] == pytest.approx(plain[name], abs=3e-6), name


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
