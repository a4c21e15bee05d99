"""Training jobs of the estimator on this machine, with real ranks: one host, two, and hosts with networks."""

import json
import textwrap
from pathlib import Path

import pytest

from shardwright.errors import LaunchError
from shardwright.launch import Estimator, LocalCluster

TRAIN = """
    import argparse, json, os
    from pathlib import Path

    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--fail", type=int)
    parser.add_argument("--mp_parameters")
    parser.add_argument("--model-dir", default=os.environ["SM_MODEL_DIR"])
    parser.add_argument("--train", default=os.environ.get("SM_CHANNEL_TRAIN"))
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    print("epochs", options.epochs, "data", os.listdir(options.train))
    if rank == options.fail:
        raise ValueError("boom on one")
    Path(options.model_dir, f"rank{rank}.json").write_text(json.dumps(dict(os.environ)))
"""

DISTRIBUTION = {
    "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2, "ddp": True}}},
    "mpi": {"enabled": True, "processes_per_host": 2},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/images").touch()
    return tmp_path


def fit(**arguments):
    hyperparameters = {"epochs": 3, **arguments.pop("hyperparameters", {})}
    whole = {"device": "auto", "distribution": DISTRIBUTION, "base_job_name": "job", **arguments}
    job = Estimator("train.py", hyperparameters=hyperparameters, **whole)
    job.fit({"train": "data"})
    return job


def environ_of(job, rank):
    return json.loads((Path(job.model_data) / f"rank{rank}.json").read_text())


def test_a_job_on_this_machine(folder, capfd):
    job = fit()
    assert "[rank 1] epochs 3 data ['images']" in capfd.readouterr().out
    environ = environ_of(job, 1)
    assert (environ["SM_CURRENT_HOST"], environ["SM_NUM_GPUS"], environ["SM_CHANNELS"]) == (
        "algo-1",
        "0",
        '["train"]',
    )
    assert json.loads(environ["SM_HP_MP_PARAMETERS"]) == {"partitions": 2, "ddp": True}
    training = json.loads(environ["SM_TRAINING_ENV"])
    assert training["hyperparameters"] == {"epochs": 3, "mp_parameters": {"partitions": 2, "ddp": True}}
    assert training["channel_input_dirs"] == {"train": str(folder / "data")}
    logs = job.latest_training_job.run_folder / "logs"
    assert "epochs 3" in (logs / "rank0.log").read_text()
    assert not (job.latest_training_job.run_folder / "output").exists()


def test_a_rank_that_fails_on_one_of_two_hosts(folder, monkeypatch):
    # The other host has nothing left to do, and nothing from which it could notice.
    monkeypatch.setattr("shardwright.launch.engines.engine._NOTICE_S", 0.5)
    with pytest.raises(LaunchError, match=r"rank 2 failed first(.|\n)*ValueError: boom on one") as caught:
        fit(instance_count=2, hyperparameters={"fail": 2})
    assert caught.value.exit_code == 5


def test_hosts_with_networks(folder, capabilities):
    if not capabilities["network namespaces"]:
        pytest.skip("it takes network namespaces")
    job = fit(instance_count=2, engine=LocalCluster(bandwidth="1 Gbit/s"))
    environ = environ_of(job, 3)
    assert (environ["MASTER_ADDR"], environ["SM_CURRENT_HOST"]) == ("10.77.0.1", "algo-2")
    assert (environ["OMPI_COMM_WORLD_SIZE"], environ["OMPI_COMM_WORLD_LOCAL_RANK"]) == ("4", "1")
    assert environ["SM_NETWORK_INTERFACE_NAME"] == "eth0"
