"""A stand-in for kubectl and the cluster behind it: pods run on this machine, as processes.

It does what the controllers of TrainJob and JobSet do with a manifest: a pod for each host, with the
variables that they give it. What pods have under ``/opt/ml`` is in the folder ``STAND_IN``, as is its state:
objects stay until they are deleted, and one that is applied again as it is stays unchanged.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

STATE = Path(os.environ["STAND_IN"])
OBJECTS = STATE / "objects.json"
RUN = 'bash -c "$0" > "$1.log" 2>&1; echo $? > "$1.tmp"; mv "$1.tmp" "$1.code"'


def read_objects():
    return json.loads(OBJECTS.read_text()) if OBJECTS.exists() else {}


def apply(words):
    import yaml  # half of the time of all other calls

    objects = read_objects()
    for document in yaml.safe_load_all(sys.stdin.read()):
        resource = f"{document['kind'].lower()}/{document['metadata']['name']}"
        before = objects.get(resource)
        if before == document:
            print(f"{resource} unchanged")
            continue
        if before is not None and "spec" in document:
            sys.exit(f"{resource} is invalid: spec: field is immutable")
        objects[resource] = document
        OBJECTS.write_text(json.dumps(objects))
        if "spec" in document:
            start(document, objects)
        print(f"{resource} created")


def start(job, objects):
    container, num_pods, variables = {"TrainJob": train_job, "JobSet": job_set}[job["kind"]](job)
    own_name = job["metadata"]["name"]
    for index in range(num_pods):
        environ = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **variables(index)}
        for entry in container["env"]:
            assert re.fullmatch(r"[-._a-zA-Z][-._a-zA-Z0-9]*", entry["name"])
            source = entry.get("valueFrom", {})
            if (reference := source.get("configMapKeyRef")) is not None:
                environ[entry["name"]] = objects[f"configmap/{reference['name']}"]["data"][reference["key"]]
            elif (reference := source.get("secretKeyRef")) is not None:
                secret = objects[f"secret/{reference['name']}"]["stringData"]
                environ[entry["name"]] = secret[reference["key"]]
            else:
                environ[entry["name"]] = expand(entry["value"], environ)
        script = expand(container["command"][-1], environ).replace("/opt/ml", f"{STATE}/pod{index}/ml")
        script = script.replace(f"{own_name}-node-0-0.{own_name}", "127.0.0.1")
        environ = {
            name: value.replace("/opt/ml", f"{STATE}/pod{index}/ml") for name, value in environ.items()
        }
        assert container["command"][:-1] == ["bash", "-c"]
        name = f"{own_name}-node-0-{index}-abcde"
        process = subprocess.Popen(
            ["bash", "-c", RUN, script, str(STATE / name)],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        (STATE / f"{name}.pid").write_text(str(process.pid))


def expand(text, environ):
    """As the kubelet does: ``$(NAME)`` where there is such a variable, and ``$$`` is ``$``."""

    def value(match):
        if match[0] == "$$":
            return "$"
        return environ.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


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
    if words[0] == "pods":
        (name,) = re.findall("^jobset.sigs.k8s.io/jobset-name=(.*)$", words[words.index("--selector") + 1])
        print(json.dumps({"items": [pod(path.stem) for path in pods_of(name)]}))
        return
    assert "--ignore-not-found" in words
    job = read_objects().get(words[0])
    if job is None:
        return
    codes = [code(path.stem) for path in pods_of(job["metadata"]["name"])]
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


def pods_of(name):
    return sorted(STATE.glob(f"{name}-node-0-*.pid"))


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
    path = STATE / "patch.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, words[0]: json.loads(words[words.index("--patch") + 1])}))


def delete(words):
    objects = read_objects()
    for resource in (word for word in words if not word.startswith("--")):
        if objects.pop(resource, None) is None and "--ignore-not-found" not in words:
            sys.exit(f"{resource} not found")
        for path in () if resource.startswith("configmap/") else pods_of(resource.partition("/")[2]):
            if code(path.stem) is None:
                os.killpg(int(path.read_text()), signal.SIGTERM)
            for left in STATE.glob(f"{path.stem}.*"):
                left.unlink()
    OBJECTS.write_text(json.dumps(objects))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    with (STATE / "calls").open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    if arguments[:1] == ["--namespace"]:
        arguments = arguments[2:]
    globals()[arguments[0]](arguments[1:])
