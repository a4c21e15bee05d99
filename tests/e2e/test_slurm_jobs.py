"""Training jobs under Slurm: a real one of two nodes where there is one, and stand-ins for its programs."""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from shardwright.errors import ConfigError, LaunchError
from shardwright.launch import Estimator, Slurm

STAND_INS = Path(__file__).parent / "stand_ins/slurm_programs.py"
PROGRAMS = ("sbatch", "srun", "squeue", "sacct", "scancel", "scontrol")

TRAIN = """
    import json, os, sys
    from pathlib import Path

    rank = os.environ["RANK"]
    if sys.argv[-2:] == ["--fail", rank]:
        raise ValueError("boom on one")
    names = ("SM_CURRENT_HOST", "SM_HOSTS", "WORLD_SIZE", "SM_HP_EPOCHS", "SM_CHANNEL_TRAIN", "LOCAL_RANK")
    found = [os.environ.get(name) for name in (*names, "FROM")]
    Path(os.environ["SM_MODEL_DIR"], f"rank{rank}.json").write_text(json.dumps(found))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    (tmp_path / "data").mkdir()
    return tmp_path


@pytest.fixture
def stand_ins(folder, monkeypatch):
    state, programs = folder / "state", folder / "bin"
    state.mkdir()
    programs.mkdir()
    for name in PROGRAMS:
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_INS} {name} "$@"\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(state))
    return state


CONFIGURATION = """
    ClusterName=test
    SlurmctldHost={host}(127.0.0.1)
    SlurmUser=root
    SlurmdUser=root
    AuthType=auth/none
    CredType=cred/none
    SlurmctldPort={port}
    StateSaveLocation={folder}/state
    SlurmdSpoolDir={folder}/spool-%n
    SlurmctldPidFile={folder}/slurmctld.pid
    SlurmdPidFile={folder}/slurmd-%n.pid
    ProctrackType=proctrack/linuxproc
    TaskPlugin=task/none
    SwitchType=switch/none
    MpiDefault=none
    SelectType=select/cons_tres
    SelectTypeParameters=CR_Core
    SchedulerType=sched/builtin
    JobAcctGatherType=jobacct_gather/none
    AccountingStorageType=accounting_storage/none
    ReturnToService=2
    KillWait=5
    NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1
    NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1
    PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


@pytest.fixture
def cluster(folder, monkeypatch, capabilities):
    """A Slurm of two nodes on this machine, which ends with the test."""
    if not capabilities["Slurm"]:
        pytest.skip("Slurm is not here: apt install slurmctld slurmd slurm-client")
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
    home = folder / "slurm"
    (home / "state").mkdir(parents=True)
    port = 21000 + os.getpid() % 8000
    names = {"folder": home, "host": os.uname().nodename.partition(".")[0]}
    ports = {"port": port, "first": port + 8000, "second": port + 16000}
    (home / "slurm.conf").write_text(textwrap.dedent(CONFIGURATION).format(**names, **ports))
    monkeypatch.setenv("SLURM_CONF", str(home / "slurm.conf"))
    daemons = []
    try:
        for words in (
            ["slurmctld", "-c", "-D"],
            ["slurmd", "-D", "-N", "node1"],
            ["slurmd", "-D", "-N", "node2"],
        ):
            with (home / f"{'-'.join(words)}.log").open("wb") as log:
                daemons.append(subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
        limit_s = time.monotonic() + 60
        while subprocess.run(["sinfo", "-h", "-t", "idle", "-o", "%D"], capture_output=True).stdout != b"2\n":
            logs = "\n".join(path.read_text(errors="replace") for path in home.glob("*.log"))
            assert time.monotonic() < limit_s, f"no two nodes became idle:\n{logs}"
            time.sleep(0.1)
        yield
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(30)


def estimator(**arguments):
    return Estimator(
        **{
            "entry_point": "train.py",
            "instance_count": 2,
            "device": "auto",
            "hyperparameters": {"epochs": 3},
            "environment": {"FROM": "it's here"},
            "distribution": {"mpi": {"enabled": True, "processes_per_host": 2}},
            "engine": Slurm(poll_s=0.1),
            **arguments,
        }
    )


def check_ranks(folder, name):
    for rank in range(4):
        found = json.loads((folder / f"runs/{name}/model/rank{rank}.json").read_text())
        host = f"node{rank // 2 + 1}"
        data = str(folder / "data")
        assert found == [host, '["node1","node2"]', "4", "3", data, str(rank % 2), "it's here"]


@pytest.mark.sweep  # on a busy machine slurmd may not get its helper started in time, and gives up
def test_a_job_of_two_nodes_under_a_real_slurm(folder, cluster, capfd):
    job = estimator()
    job.fit({"train": "data"}, job_name="one")
    check_ranks(folder, "one")
    assert job.latest_training_job.status == "Completed"
    assert "shardwright run: 2 ranks on each of 2 hosts" in capfd.readouterr().out


@pytest.mark.sweep  # it starts another cluster
def test_a_rank_that_fails_under_a_real_slurm_is_named(folder, cluster):
    with pytest.raises(LaunchError, match=r"rank 3 failed first(.|\n)*ValueError: boom on one") as caught:
        estimator(hyperparameters={"epochs": 3, "fail": 3}).fit(logs=False)
    assert caught.value.exit_code == 5


def test_the_batch_script_runs_on_each_node(folder, stand_ins, monkeypatch):
    monkeypatch.setenv("SM_MODEL_DIR", "/of/another/job")
    job = estimator(
        engine=Slurm(partition="gpu", options={"constraint": "a100"}, cpus_per_host=2, poll_s=0.1)
    )
    job.fit({"train": "data"}, job_name="one", logs=False)
    check_ranks(folder, "one")
    options = ast.literal_eval((stand_ins / "100.options").read_text())
    assert options == {
        "job-name": "one",
        "nodes": "2",
        "ntasks-per-node": "1",
        "output": str(folder / "runs/one/logs/slurm.log"),
        "chdir": str(folder),
        "partition": "gpu",
        "cpus-per-task": "2",
        "constraint": "a100",
    }
    environ = ast.literal_eval((stand_ins / "100.environ").read_text())
    assert environ["SM_MODEL_DIR"] == str(folder / "runs/one/model")  # the nodes inherit it
    assert (folder / "runs/one/job.sbatch").read_text() == job.manifest({"train": "data"}, "one")


# What sbatch has a meaning for, and what the batch script has one for.
AWKWARD = 'it\'s "100%j" #1'
WORDS = ["-a", '@NODE@ "$1"', "-b", "it's @ENDPOINT@ `$SLURM_NODEID`", "-c", "100%j \\"]


def in_awkward_folders(folder, **options):
    source = folder / AWKWARD
    source.mkdir()
    script = "import os, sys\nopen(f'argv{os.environ[\"RANK\"]}', 'w').write(repr(sys.argv[1:]))"
    (source / "train it.py").write_text(script)
    return estimator(
        entry_point="train it.py",
        source_dir=source,
        output_path=source / "all runs",
        hyperparameters={"a": WORDS[1], "b": WORDS[3], "c": WORDS[5]},
        engine=Slurm(poll_s=0.1, options={"comment": 'say "hi" \\ #2'}, **options),
    )


def test_folders_and_hyperparameters_of_any_name(folder, stand_ins):
    """Folders with spaces or quotes broke the batch script; `@NODE@` in a hyperparameter became the node."""
    python = folder / "my python"
    python.write_text('#!/bin/sh\npwd > "argv$SLURM_NODEID"\nprintf "%s\\0" "$@" >> "argv$SLURM_NODEID"\n')
    python.chmod(0o755)
    in_awkward_folders(folder, python=str(python)).fit(job_name="one", logs=False)
    source = folder / AWKWARD
    for node in range(2):
        words = (source / f"argv{node}").read_text().split("\0")[:-1]
        assert words[0] == f"{source}\n-P"
        assert words[-7:] == ["train it.py", *WORDS]
        assert words[words.index("--node-rank") + 1] == str(node)
        assert words[words.index("--run-dir") + 1] == str(source / "all runs")
    assert (source / "all runs/one/logs/slurm.log").exists()
    options = ast.literal_eval((stand_ins / "100.options").read_text())
    assert (options["chdir"], options["comment"]) == (str(source), 'say "hi" \\ #2')


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": Slurm(options={"comment": "two\nlines"})}, r"--comment of sbatch is 'two\\nlines'"),
        ({"output_path": "a\\b"}, r"Slurm leaves out backslashes there\. Set output_path"),
        ({"source_dir": "two\nlines"}, r"source_dir is 'two\\nlines', but it must not have"),
    ],
)
def test_what_no_batch_script_can_hold(folder, arguments, message):
    (folder / "two\nlines").mkdir()
    (folder / "two\nlines/train.py").touch()
    with pytest.raises(ConfigError, match=message):
        estimator(**arguments).fit(job_name="one")
    assert not list(folder.rglob("one"))


def test_the_rank_that_failed_first_is_named(folder, stand_ins):
    job = estimator(instance_count=1, hyperparameters={"fail": 1})
    with pytest.raises(LaunchError) as caught:
        job.fit(logs=False)
    text = str(caught.value)
    assert "Slurm job 100 ended as FAILED. rank 1 failed first" in text
    assert "ValueError: boom on one" in text
    assert caught.value.exit_code == job.latest_training_job.exit_code == 5


def test_a_job_can_be_stopped(folder, stand_ins):
    job = estimator(instance_count=1, engine=Slurm(poll_s=0.1, setup="sleep 60"))
    job.fit(wait=False, job_name="one")
    running = job.latest_training_job
    assert running.status == "InProgress"
    with pytest.raises(ConfigError, match=r"goes on in .*\(Slurm job 100, RUNNING: scancel 100 stops it\)"):
        job.fit(job_name="one")
    running.stop()
    with pytest.warns(UserWarning, match="was stopped before its end"):
        running.wait(logs=False)
    assert running.status == "Stopped"
    with pytest.raises(LaunchError, match="ended as FAILED"):  # now it may go on
        estimator(instance_count=1, engine=Slurm(poll_s=0.1, setup="exit 7")).fit(job_name="one", logs=False)


SAVES = """
    import os, pathlib, signal, sys, time


    def save(*_):
        pathlib.Path("saved").touch()
        sys.exit(75)

    if pathlib.Path("saved").exists():
        sys.exit(0)
    signal.signal(signal.SIGUSR1, save)
    pathlib.Path(f"ready{os.environ['RANK']}").touch()
    time.sleep(600)
"""


@pytest.mark.parametrize("asks", [True, False])
def test_a_job_saves_before_its_time_is_over_and_is_queued_again(folder, stand_ins, asks):
    (folder / "train.py").write_text(textwrap.dedent(SAVES))
    own = {} if asks else {"signal": "USR1@120"}
    engine = Slurm(poll_s=0.1, requeue=asks, options={"time": "10:00:00", **own})
    job = estimator(engine=engine)
    job.fit(job_name="long", wait=False)
    wait_until(lambda: all((folder / f"ready{rank}").exists() for rank in range(4)))
    script = subprocess.check_output(["pgrep", "-P", (stand_ins / "100.pid").read_text()], text=True)
    if asks:
        os.kill(int(script), signal.SIGUSR1)
    else:  # which Slurm sends to the tasks
        (task,) = subprocess.check_output(["pgrep", "-P", script.strip()], text=True).split()
        os.kill(int(task), signal.SIGUSR1)
    wait_until((stand_ins / "100.code").exists)
    assert (stand_ins / "100.code").read_text() == "75\n"
    assert (stand_ins / "100.requeued").exists() == asks
    options = ast.literal_eval((stand_ins / "100.options").read_text())
    assert options["signal"] == ("B:USR1@120" if asks else "USR1@120")
    assert ("requeue" in options) == asks
    with pytest.raises(LaunchError, match="75"):
        job.latest_training_job.wait(logs=False)


def test_what_does_not_go_with_a_job_that_is_queued_again(folder):
    with pytest.raises(ConfigError, match="Leave the option signal out"):
        Slurm(requeue=True, options={"signal": "USR1@60"})
    with pytest.raises(ConfigError, match=r"max_run is 300 s.*Give at least 600"):
        estimator(engine=Slurm(requeue=True), max_run=300).manifest()


def wait_until(condition, limit_s=60):
    limit_s += time.monotonic()
    while not condition():
        assert time.monotonic() < limit_s
        time.sleep(0.1)


@pytest.mark.sweep  # it starts another cluster, and a time limit of Slurm takes minutes
def test_a_job_goes_on_after_its_time_under_a_real_slurm(folder, cluster):
    (folder / "train.py").write_text(textwrap.dedent(SAVES))
    job = estimator(engine=Slurm(poll_s=0.5, requeue=True, options={"time": "3"}))
    job.fit(job_name="long", logs=False)
    assert (folder / "saved").exists()
    assert job.latest_training_job.status == "Completed"


def test_the_time_limit_and_gpus_are_asked_for(folder):
    job = estimator(
        instance_type="ml.p4d.24xlarge", max_run=90, distribution={"pytorchddp": {"enabled": True}}
    )
    script = job.manifest()
    assert "#SBATCH --gpus-per-node=8\n#SBATCH --time=2\n" in script
    assert "--nproc-per-node 8 --nnodes 2" in script
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_programs_that_are_not_here(folder, monkeypatch):
    if shutil.which("sbatch"):
        monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(LaunchError, match="there is no program sbatch on the PATH"):
        estimator().fit()
    with pytest.raises(ConfigError, match="'--x', which is no option of sbatch"):
        Slurm(options={"--x": "1"})
