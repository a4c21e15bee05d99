"""A stand-in for kubectl and the cluster behind it: pods run on this machine, as processes.

It does what the controllers of TrainJob and JobSet do with a manifest: a pod for each host, with the
variables that they give it. What pods have under ``/opt/ml`` is in the folder ``STAND_IN``, as is its state.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import yaml

STATE = Path(os.environ["STAND_IN"])
RUN = 'bash -c "$0" > "$1.log" 2>&1; echo $? > "$1.tmp"; mv "$1.tmp" "$1.code"'


def apply(words):
    documents = list(yaml.safe_load_all(Path(words[words.index("--filename") + 1]).read_text()))
    (STATE / "applied.json").write_text(json.dumps(documents))
    maps = {document["metadata"]["name"]: document["data"] for document in documents if "data" in document}
    (job,) = (document for document in documents if "spec" in document)
    container, num_pods, variables = {"TrainJob": train_job, "JobSet": job_set}[job["kind"]](job)
    for index in range(num_pods):
        environ = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **variables(index)}
        for entry in container["env"]:
            reference = entry.get("valueFrom", {}).get("configMapKeyRef")
            environ[entry["name"]] = (
                entry["value"] if reference is None else maps[reference["name"]][reference["key"]]
            )
        environ = {
            name: value.replace("/opt/ml", f"{STATE}/pod{index}/ml") for name, value in environ.items()
        }
        script = container["command"][-1].replace("/opt/ml", f"{STATE}/pod{index}/ml")
        script = script.replace(f"{job['metadata']['name']}-node-0-0.{job['metadata']['name']}", "127.0.0.1")
        assert container["command"][:-1] == ["bash", "-c"]
        name = f"{job['metadata']['name']}-node-0-{index}-abcde"
        process = subprocess.Popen(
            ["bash", "-c", RUN, script, str(STATE / name)],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        (STATE / f"{name}.pid").write_text(str(process.pid))
    print("applied")


def train_job(job):
    trainer = job["spec"]["trainer"]

    def variables(index):
        return {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": os.environ["STAND_IN_PORT"],
        }

    return trainer, trainer["numNodes"], variables


def job_set(job):
    (replicated,) = job["spec"]["replicatedJobs"]
    batch = replicated["template"]["spec"]
    (container,) = batch["template"]["spec"]["containers"]
    return container, batch["completions"], lambda index: {"JOB_COMPLETION_INDEX": str(index)}


def get(words):
    documents = json.loads((STATE / "applied.json").read_text())
    job = documents[-1]
    if (STATE / "deleted").exists():
        return
    if words[0] == "pods":
        assert (
            words[words.index("--selector") + 1]
            == f"jobset.sigs.k8s.io/jobset-name={job['metadata']['name']}"
        )
        print(json.dumps({"items": [pod(path.stem) for path in sorted(STATE.glob("*.pid"))]}))
        return
    assert words[0] == f"{job['kind'].lower()}/{job['metadata']['name']}"
    codes = [code(path.stem) for path in STATE.glob("*.pid")]
    conditions = [{"type": "Suspended", "status": "False"}]
    if any(codes):
        conditions.append(
            {"type": "Failed", "status": "True", "message": "jobset failed due to one or more jobs"}
        )
    elif None not in codes:
        done = {"TrainJob": "Complete", "JobSet": "Completed"}[job["kind"]]
        conditions.append({"type": done, "status": "True", "message": "done"})
    print(
        json.dumps(
            {**job, "metadata": {**job["metadata"], "uid": "1-2-3"}, "status": {"conditions": conditions}}
        )
    )


def code(name):
    path = STATE / f"{name}.code"
    return int(path.read_text()) if path.exists() else None


def pod(name):
    ended = code(name)
    phase = "Running" if ended is None else "Failed" if ended else "Succeeded"
    state = {"running": {}}
    if ended is not None:
        time = f"2026-01-01T00:00:{int((STATE / f'{name}.code').stat().st_mtime) % 60:02}Z"
        state = {
            "terminated": {"exitCode": ended, "reason": "Error" if ended else "Completed", "finishedAt": time}
        }
    return {
        "metadata": {"name": name},
        "status": {"phase": phase, "containerStatuses": [{"name": "node", "state": state}]},
    }


def logs(words):
    name = words[-1]
    follow = ["tail", "--pid", (STATE / f"{name}.pid").read_text(), "-n", "+1", "-s", "0.1", "-f"]
    os.execvp("tail", [*follow, str(STATE / f"{name}.log")])


def patch(words):
    (STATE / "patch.json").write_text(json.dumps({words[0]: json.loads(words[words.index("--patch") + 1])}))


def delete(words):
    (STATE / "deleted").touch()
    for path in STATE.glob("*.pid"):
        os.killpg(int(path.read_text()), signal.SIGTERM)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    with (STATE / "calls").open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    if arguments[:1] == ["--namespace"]:
        arguments = arguments[2:]
    globals()[arguments[0]](arguments[1:])
