"""Training jobs on Ray: a real cluster of this machine, and what the driver is told."""

import json
import textwrap

import pytest

from shardwright.errors import LaunchError
from shardwright.launch import Estimator, Ray

TRAIN = """
    import os, sys
    from pathlib import Path
    import torch, torch.distributed as dist
    from shardwright.comm.launchers import detect
    from shardwright.comm.joining.process_group import init_process_group

    environment = detect(os.environ)
    init_process_group(environment, backend="gloo", timeout_s=60)
    value = torch.tensor([environment.rank + 1.0])
    dist.all_reduce(value)
    if environment.rank == 1 and "--failures" in sys.argv:
        failed = Path(os.environ["SM_MODEL_DIR"], "failed")
        times = len(failed.read_text()) if failed.exists() else 0
        if times < int(sys.argv[-1]):
            failed.write_text("x" * (times + 1))
            raise ValueError("boom on one")
    result = f"{value.item()} {os.environ['SM_HP_EPOCHS']}"
    Path(os.environ["SM_MODEL_DIR"], f"sum{environment.rank}").write_text(result)
    print("rank", environment.rank, "is done")
    dist.destroy_process_group()
"""


@pytest.fixture
def needs_ray(capabilities):
    if not capabilities["ray"]:
        pytest.skip("Ray is not here: pip install 'shardwright[ray]'")


@pytest.fixture
def estimator(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))

    def made(**arguments):
        return Estimator(
            "train.py",
            device="auto",
            engine=Ray(),
            distribution={"torch_distributed": {"enabled": True, "processes_per_host": 2}},
            **{"hyperparameters": {"epochs": 3}, **arguments},
        )

    return made


def test_a_job_on_two_workers_of_a_real_ray(estimator, tmp_path, needs_ray):
    estimator().fit(job_name="one")
    model = tmp_path / "runs/one/model"
    assert [(model / f"sum{rank}").read_text() for rank in (0, 1)] == ["3.0 3", "3.0 3"]
    assert "rank 1 is done" in (tmp_path / "runs/one/logs/rank1.log").read_text()


@pytest.mark.sweep  # it starts another cluster
def test_ranks_on_ray_are_restarted_and_the_one_that_fails_is_named(estimator, tmp_path, needs_ray):
    job = estimator(hyperparameters={"epochs": 3, "failures": 1}, max_restarts=1)
    job.fit(job_name="one")
    assert (tmp_path / "runs/one/model/sum1").read_text() == "3.0 3"
    with pytest.raises(LaunchError, match=r"rank 1 failed first(.|\n)*ValueError: boom on one") as caught:
        estimator(hyperparameters={"epochs": 3, "failures": 9}).fit(job_name="two")
    assert caught.value.exit_code == 5


def test_what_the_trainer_is_told(estimator):
    job = estimator(instance_type="ml.p4d.24xlarge", instance_count=2, max_restarts=3)
    task = json.loads(job.manifest(job_name="one"))
    assert task["scaling_config"] == {
        "num_workers": 4,
        "use_gpu": True,
        "resources_per_worker": {"CPU": 1, "GPU": 1},
        "placement_strategy": "PACK",
    }
    assert task["max_failures"] == 3
    assert task["train_loop_config"]["arguments"] == ["--epochs", "3"]


def test_ray_that_is_not_installed(estimator, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"Install it: pip install 'shardwright\[ray\]'"):
        estimator().fit()
