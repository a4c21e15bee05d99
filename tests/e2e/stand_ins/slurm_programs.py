"""Stand-ins for Slurm's programs: jobs run on this machine, with the variables that Slurm sets.

Called as ``python slurm_programs.py NAME ARGUMENTS``; the state of jobs is in the folder ``STAND_IN``.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

RUN = 'bash "$1"; echo $? > "$2.tmp"; mv "$2.tmp" "$2"'
STATE = Path(os.environ["STAND_IN"])


def sbatch(words):
    script = Path(words[-1])
    lines = re.findall(r"^#SBATCH (.*)$", script.read_text(), flags=re.MULTILINE)
    # It reads quotes and backslashes in them, and takes what stands behind a space for another option.
    options = dict(word.partition("=")[::2] for line in lines for word in shlex.split(line))
    options = {word.removeprefix("--"): value for word, value in options.items() if word.startswith("--")}
    number = str(100 + len(list(STATE.glob("*.options"))))
    (STATE / f"{number}.options").write_text(repr(options))
    (STATE / f"{number}.environ").write_text(repr(dict(os.environ)))
    nodes = int(options["nodes"])
    environ = {
        **os.environ,
        "SLURM_JOB_ID": number,
        "SLURM_JOB_NODELIST": ",".join(f"node{n + 1}" for n in range(nodes)),
        "SLURM_NNODES": str(nodes),
        # In a batch script these are those of its first task; a launcher must not take them for its own.
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": str(nodes),
    }
    patterns = {"%": "%", "j": number}
    path = re.sub("%(.)", lambda match: patterns[match[1]], options["output"])
    with Path(path).open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", RUN, "-", str(script), str(STATE / f"{number}.code")],
            env=environ,
            cwd=options["chdir"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    (STATE / f"{number}.pid").write_text(str(process.pid))
    print(f"{number};cluster")


def srun(words):
    command = words[next(n for n, word in enumerate(words) if not word.startswith("-")) :]
    assert "--kill-on-bad-exit=1" in words
    tasks = []
    for node in range(int(os.environ["SLURM_NNODES"])):
        own = {"SLURM_NODEID": str(node), "SLURM_PROCID": str(node), "SLURM_LOCALID": "0"}
        own |= {"SLURMD_NODENAME": f"node{node + 1}", "SLURM_STEP_ID": "0"}
        tasks.append(subprocess.Popen(command, env={**os.environ, **own}))
    signal.signal(signal.SIGUSR1, lambda number, _: [task.send_signal(number) for task in tasks])
    codes = []
    while tasks:
        for task in list(tasks):
            try:
                codes.append(task.wait(0.05))
            except subprocess.TimeoutExpired:
                continue
            tasks.remove(task)
            if codes[-1]:
                for other in tasks:
                    other.kill()
    sys.exit(max(code if code >= 0 else 128 - code for code in codes))


def squeue(words):
    number = words[words.index("--jobs") + 1]
    if (STATE / f"{number}.code").exists():
        sys.exit("slurm_load_jobs error: Invalid job id specified")
    held = (STATE / "held").exists()
    state, reason = ("PENDING", "launch failed requeued held") if held else ("RUNNING", "None")
    print(words[words.index("--format") + 1].replace("%T", state).replace("%r", reason))


def sacct(words):
    number = words[words.index("--jobs") + 1]
    if (STATE / f"{number}.cancelled").exists():
        print("CANCELLED by 0|0:15")
        return
    code = int((STATE / f"{number}.code").read_text())
    print(f"{'FAILED' if code else 'COMPLETED'}|{code}:0")


def scancel(words):
    (STATE / f"{words[0]}.cancelled").touch()
    os.killpg(int((STATE / f"{words[0]}.pid").read_text()), signal.SIGTERM)
    (STATE / f"{words[0]}.code").write_text("143")


def scontrol(words):
    if words[:2] == ["show", "hostnames"]:
        print(words[2].replace(",", "\n"))
    elif words[:3] == ["show", "node", "-o"]:
        print(f"NodeName={words[3]} Arch=x86_64 NodeAddr=127.0.0.1 NodeHostName={words[3]} Port=0")
    elif words[0] == "requeue":
        (STATE / f"{words[1]}.requeued").touch()
    else:
        sys.exit(1)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2:])
