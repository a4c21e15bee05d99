"""Training jobs on Kubernetes: their manifests, and a cluster that is a stand-in for kubectl.

The stand-in runs the containers' commands on this machine, with the variables that controllers give pods.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import yaml

from choices import in_sweep
from shardwright.errors import ConfigError, LaunchError
from shardwright.launch import Estimator, Kubernetes
from shardwright.launch.engines.packed_code import pack

STAND_IN = Path(__file__).parent / "stand_ins/kubectl.py"

TRAIN = """
    import json, os, sys
    from pathlib import Path
    from package.names import NAMES

    rank = os.environ["RANK"]
    if sys.argv[-2:] == ["--fail", rank]:
        raise ValueError("boom on one")
    found = [os.environ.get(name) for name in NAMES]
    Path(os.environ["SM_MODEL_DIR"], f"rank{rank}.json").write_text(json.dumps(found))
    print("rank", rank, "is done")
"""

NAMES = ("SM_CURRENT_HOST", "WORLD_SIZE", "SM_HP_EPOCHS", "SM_CHANNEL_TRAIN", "LOCAL_RANK", "FROM")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "src"
    (source / "package").mkdir(parents=True)
    (source / "train.py").write_text(textwrap.dedent(TRAIN))
    (source / "package/names.py").write_text(f"NAMES = {NAMES!r}\n")
    return tmp_path


@pytest.fixture
def cluster(folder, monkeypatch):
    state, programs = folder / "state", folder / "bin"
    state.mkdir()
    programs.mkdir()
    (programs / "kubectl").write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    (programs / "kubectl").chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(state))
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("STAND_IN_PORT", str(server.getsockname()[1]))
    return state


def estimator(**arguments):
    engine = {"kind": "TrainJob", "namespace": "team", "poll_s": 0.2, "python": sys.executable}
    return Estimator(
        **{
            "entry_point": "train.py",
            "source_dir": "src",
            "instance_count": 2,
            "device": "auto",
            "hyperparameters": {"epochs": 3},
            "environment": {"FROM": "it's $HOME"},
            "distribution": {"mpi": {"enabled": True, "processes_per_host": 2}},
            "engine": Kubernetes(**{**engine, **arguments.pop("engine", {})}),
            **arguments,
        }
    )


def fit(job, **arguments):
    job.fit({"train": "/data/train"}, **arguments)


def test_a_train_job_of_two_pods(folder, cluster, capfd):
    job = estimator()
    fit(job, job_name="Training-1")
    for rank in range(4):
        path = cluster / f"pod{rank // 2}/ml/runs/Training-1/model/rank{rank}.json"
        host = f"algo-{rank // 2 + 1}"
        assert json.loads(path.read_text()) == [host, "4", "3", "/data/train", str(rank % 2), "it's $HOME"]
    shown = capfd.readouterr()
    assert "rank 3 is done" in shown.out
    assert "shardwright: trainjob/training-1: training-1-node-0-0-abcde Running" in shown.err
    log = folder / "runs/Training-1/logs/pod-training-1-node-0-1-abcde.log"
    assert "[rank 2] rank 2 is done" in log.read_text()
    patched = json.loads((cluster / "patch.json").read_text())
    owner = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
    owner |= {"name": "training-1", "uid": "1-2-3"}
    owned = {"metadata": {"ownerReferences": [owner]}}
    assert patched == dict.fromkeys(("configmap/training-1-code", "secret/training-1-secret"), owned)
    calls = [json.loads(line) for line in (cluster / "calls").read_text().splitlines()]
    assert all(call[:2] == ["--namespace", "team"] for call in calls)


def test_a_job_set_that_fails(folder, cluster):
    job = estimator(
        engine={"kind": "JobSet", "image": "registry/image:1"},
        instance_count=1,
        hyperparameters={"fail": 1},
    )
    with pytest.raises(LaunchError) as caught:
        fit(job, logs=False, job_name="one")
    text = str(caught.value)
    assert "jobset/one failed: jobset failed due to one or more jobs" in text
    assert "pod one-node-0-0-abcde ended with exit code 5.\nrank 1 failed first" in text
    assert "ValueError: boom on one" in text
    assert caught.value.exit_code == 5
    assert job.latest_training_job.describe()["TrainingJobStatus"] == "Failed"


def test_a_job_is_stopped_by_deleting_it(folder, cluster):
    (folder / "src/train.py").write_text("import time\ntime.sleep(60)\n")
    job = estimator(instance_count=1)
    fit(job, wait=False, job_name="one")
    job.latest_training_job.stop()
    with pytest.warns(UserWarning, match="was stopped before its end"):
        job.latest_training_job.wait(logs=False)
    assert job.latest_training_job.status == "Stopped"


def recording(folder, script="exit 0"):
    """An interpreter that writes down with what it was started, without an import of PyTorch."""
    python = folder / "bin/recording-python"
    written = folder / "started"
    python.write_text(f'#!/bin/sh\n(printf "%s\\0" "$@"; env -0; echo) >> {written}\n{script}\n')
    python.chmod(0o755)
    return {"python": str(python)}, written


@pytest.mark.parametrize(("kind", "code"), [in_sweep("TrainJob", 0), ("JobSet", 7)])
def test_a_job_that_has_ended_goes_on_under_its_name(folder, cluster, kind, code):
    """Applied as it was, the ended job of the cluster stayed, and its end passed for that of the new one."""
    engine, written = recording(folder, f"[ -e {folder}/again ] || exit {code}")
    job = estimator(engine={"kind": kind, "image": "image:1", **engine}, instance_count=1)
    with pytest.raises(LaunchError, match="exit code 7") if code else contextlib.nullcontext():
        fit(job, job_name="one", logs=False)
    (folder / "again").touch()
    fit(job, job_name="one", logs=False)
    assert len(written.read_bytes().splitlines()) == 2
    calls = [json.loads(line)[2:] for line in (cluster / "calls").read_text().splitlines()]
    (deleted,) = [call for call in calls if call[0] == "delete"]
    assert deleted[1:3] == [f"{kind.lower()}/one", "configmap/one-code"]
    assert {"--wait", "--cascade=foreground"} <= set(deleted)


def test_a_job_that_goes_on_is_left_alone(folder, cluster):
    engine, _ = recording(folder, "echo from the first\nsleep 60")
    job = estimator(engine=engine, instance_count=1)
    fit(job, wait=False, job_name="one")
    first = job.latest_training_job
    log = first.run_folder / "logs/pod-one-node-0-0-abcde.log"
    while not log.exists() or "from the first" not in log.read_text():
        assert first.status == "InProgress"
        time.sleep(0.01)
    with pytest.raises(ConfigError, match=r"job one goes on in .* \(kubectl delete trainjob/one stops it\)"):
        fit(job, job_name="one")
    assert first.status == "InProgress"
    assert log.read_text() == "from the first\n"
    first.stop()
    with pytest.warns(UserWarning, match="was stopped before its end"):
        first.wait(logs=False)


def test_dollars_and_names_that_kubernetes_has_a_meaning_for(folder, cluster):
    """It expands `$(NAME)` and `$$` in commands and variables, and refuses names with spaces."""
    engine, written = recording(folder)
    words = {"a": "$(HOME) $$ @NODE@ $(NONE)", "b": "@ENDPOINT@ $", "two words": 1}
    variables = {"FROM": "$(HOME)$$x$"}
    job = estimator(engine=engine, instance_count=1, hyperparameters=words, environment=variables)
    fit(job, job_name="one", logs=False)
    started = written.read_text().split("\0")
    arguments = ["-a", "$(HOME) $$ @NODE@ $(NONE)", "-b", "@ENDPOINT@ $", "--two words", "1"]
    assert started[started.index("train.py") + 1 :][: len(arguments)] == arguments
    assert {"FROM=$(HOME)$$x$", f"SM_HP_A={arguments[1]}"} <= set(started)
    with pytest.raises(ConfigError, match="environment has '1st', but on Kubernetes names of variables are"):
        estimator(environment={"1st": "x"}).manifest()


# Fields of the published types, as far as manifests have them: dictionaries and lists of them, else values.
VALUE = object()
KEY = {"name": VALUE, "key": VALUE}
ENV = [{"name": VALUE, "value": VALUE, "valueFrom": {"configMapKeyRef": KEY, "secretKeyRef": KEY}}]
RESOURCES = {"requests": VALUE, "limits": VALUE}
VOLUMES = [{"name": VALUE, "emptyDir": VALUE, "persistentVolumeClaim": {"claimName": VALUE}}]
MOUNTS = [{"name": VALUE, "mountPath": VALUE}]
METADATA = {"name": VALUE, "namespace": VALUE, "labels": VALUE}
POD_PATCH = {
    "volumes": VOLUMES,
    "nodeSelector": VALUE,
    "serviceAccountName": VALUE,
    "containers": [{"name": VALUE, "volumeMounts": MOUNTS}],
}
PATCH = {
    "spec": {"replicatedJobs": [{"name": VALUE, "template": {"spec": {"template": {"spec": POD_PATCH}}}}]}
}
TRAINER = {
    "image": VALUE,
    "command": [VALUE],
    "env": ENV,
    "numNodes": VALUE,
    "numProcPerNode": VALUE,
    "resourcesPerNode": RESOURCES,
}
TRAIN_JOB = {
    "apiVersion": VALUE,
    "kind": VALUE,
    "metadata": METADATA,
    "spec": {
        "runtimeRef": {"name": VALUE},
        "trainer": TRAINER,
        "runtimePatches": [{"manager": VALUE, "trainingRuntimeSpec": {"template": PATCH}}],
        "activeDeadlineSeconds": VALUE,
    },
}
OLDER_TRAIN_JOB = {
    **TRAIN_JOB,
    "spec": {
        "runtimeRef": {"name": VALUE},
        "trainer": TRAINER,
        "podTemplateOverrides": [{"targetJobs": [{"name": VALUE}], "spec": POD_PATCH}],
    },
}
CONTAINER = {
    "name": VALUE,
    "image": VALUE,
    "command": [VALUE],
    "env": ENV,
    "ports": [{"containerPort": VALUE}],
    "resources": RESOURCES,
    "volumeMounts": MOUNTS,
}
JOB = {
    "completionMode": VALUE,
    "completions": VALUE,
    "parallelism": VALUE,
    "backoffLimit": VALUE,
    "activeDeadlineSeconds": VALUE,
    "template": {"spec": {**POD_PATCH, "restartPolicy": VALUE, "containers": [CONTAINER]}},
}
JOB_SET = {
    "apiVersion": VALUE,
    "kind": VALUE,
    "metadata": METADATA,
    "spec": {
        "network": {"enableDNSHostnames": VALUE, "publishNotReadyAddresses": VALUE},
        "failurePolicy": {"maxRestarts": VALUE},
        "replicatedJobs": [{"name": VALUE, "replicas": VALUE, "template": {"spec": JOB}}],
    },
}


def unknown_fields(found, known, path=""):
    if known is VALUE:
        return []
    if isinstance(known, list):
        assert isinstance(found, list), path
        return [field for entry in found for field in unknown_fields(entry, known[0], f"{path}[]")]
    unknown = [f"{path}.{key}" for key in found if key not in known]
    for key in found.keys() & known.keys():
        unknown += unknown_fields(found[key], known[key], f"{path}.{key}")
    return unknown


WHOLE = {
    "image": "registry/image:1",
    "volumes": {"/data": "datasets", "/opt/ml": "results"},
    "resources": {"cpu": "16", "memory": "64Gi"},
    "node_selector": {"gpu": "a100"},
    "service_account": "trainer",
    "labels": {"kueue.x-k8s.io/queue-name": "team"},
}


@pytest.mark.parametrize(
    ("engine", "known"),
    [
        ({"kind": "TrainJob"}, TRAIN_JOB),
        ({"kind": "TrainJob", "trainer_version": "2.1.0"}, OLDER_TRAIN_JOB),
        ({"kind": "JobSet"}, JOB_SET),
    ],
)
def test_manifests_have_the_fields_of_the_published_types(folder, engine, known):
    job = estimator(
        engine={**WHOLE, **engine},
        instance_type="ml.p4d.24xlarge",
        max_run=3600,
        distribution={"torch_distributed": {"enabled": True}},
    )
    code, _secret, manifest = yaml.safe_load_all(job.manifest({"train": "/data/train"}, "one"))
    assert (code["kind"], code["metadata"]) == ("ConfigMap", {"name": "one-code", "namespace": "team"})
    assert unknown_fields(manifest, known) == []
    every = json.dumps(manifest)
    for text in (
        '"nvidia.com/gpu": "8"',
        '"claimName": "datasets"',
        '"gpu": "a100"',
        '"mountPath": "/dev/shm"',
    ):
        assert text in every
    assert ('"activeDeadlineSeconds": 3600' in every) is (known is not OLDER_TRAIN_JOB)
    assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}


def test_pods_of_a_job_set_meet_at_the_first(folder):
    job = estimator(engine={**WHOLE, "kind": "JobSet", "code": "/workspace"})
    secret, manifest = yaml.safe_load_all(job.manifest(job_name="one"))
    assert secret["kind"] == "Secret"
    (container,) = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    script = container["command"][-1]
    assert script.startswith("set -e\ncd /workspace\nexec ")
    assert '--node-rank "$$JOB_COMPLETION_INDEX" --rdzv-endpoint one-node-0-0.one:29500' in script
    assert {"name": "SM_MODULE_DIR", "value": "/workspace"} in container["env"]


def test_the_script_is_packed_in_parts(folder):
    source = folder / "src"
    (source / ".secret").write_text("not for the cluster")
    (source / "runs").mkdir()
    (source / "big.bin").write_bytes(os.urandom(100_000))
    parts = pack(source, without=source / "runs")
    assert [len(part) for part in parts][:-1] == [96 * 1024] * (len(parts) - 1)
    listed = subprocess.run(
        ["bash", "-c", "base64 -d | tar -tz"],
        input="".join(parts),
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(listed.stdout.split()) == ["big.bin", "package/names.py", "train.py"]
    (source / "big.bin").write_bytes(os.urandom(1_000_000))
    with pytest.raises(ConfigError, match=r"too big to go with the job.*Kubernetes\(code=\"/workspace\"\)"):
        pack(source, without=source / "runs")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": {"kind": "JobSet"}}, "a JobSet needs the image of a container"),
        ({"base_job_name": "1st"}, "its name must begin with a letter"),
        ({"dependencies": ["src"]}, "dependencies stay on this machine"),
    ],
)
def test_what_a_cluster_cannot_take(folder, arguments, message):
    with pytest.raises(ConfigError, match=message):
        estimator(**arguments).manifest()
    with pytest.raises(
        ConfigError, match="input train is data, but on Kubernetes it must be a folder as pods"
    ):
        estimator().manifest({"train": "data"})


def test_a_cluster_that_refuses_a_manifest(folder, cluster):
    (cluster.parent / "bin/kubectl").write_text(
        "#!/bin/sh\necho 'no matches for kind TrainJob' >&2\nexit 1\n"
    )
    with pytest.raises(LaunchError, match=r"failed with exit code 1: no matches for kind TrainJob"):
        fit(estimator())
