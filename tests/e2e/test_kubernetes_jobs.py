"""Manifests of training jobs on Kubernetes."""

import json
import os
import subprocess

import pytest
import yaml

from shardwright.errors import ConfigError
from shardwright.launch import Estimator, Kubernetes
from shardwright.launch.engines.kubernetes import pack


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "src"
    (source / "package").mkdir(parents=True)
    (source / "train.py").write_text("import package.names\n")
    (source / "package/names.py").write_text("NAMES = ()\n")
    return tmp_path


def estimator(**arguments):
    engine = {"namespace": "team", "image": "image"}
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


def test_manifests_have_the_fields_of_the_published_types(folder):
    job = estimator(
        engine=WHOLE,
        instance_type="ml.p4d.24xlarge",
        max_run=3600,
        distribution={"torch_distributed": {"enabled": True}},
    )
    code, _secret, manifest = yaml.safe_load_all(job.manifest({"train": "/data/train"}, "one"))
    assert (code["kind"], code["metadata"]) == ("ConfigMap", {"name": "one-code", "namespace": "team"})
    assert unknown_fields(manifest, JOB_SET) == []
    every = json.dumps(manifest)
    for text in (
        '"nvidia.com/gpu": "8"',
        '"claimName": "datasets"',
        '"gpu": "a100"',
        '"mountPath": "/dev/shm"',
    ):
        assert text in every
    assert '"activeDeadlineSeconds": 3600' in every
    assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}


def test_pods_of_a_job_set_meet_at_the_first(folder):
    job = estimator(engine={**WHOLE, "code": "/workspace"})
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
        ({"engine": {"image": None}}, "a JobSet needs the image of a container"),
        ({"engine": {"kind": "TrainJob"}}, "which clusters with Kubeflow Trainer have, too"),
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
