"""Training jobs under Slurm: writes and submits a batch script, and follows its log.

The job's folder and Python's environment must be on a file system that the nodes share.
"""

import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwright.comm.joining.run_secret import SECRET, SECRET_FILE
from shardwright.errors import ConfigError, LaunchError
from shardwright.exit_codes import ENVIRONMENT
from shardwright.files import UserFile, replace_file
from shardwright.launch.engines.engine import (
    ShellText,
    is_variable,
    prepared_run_folder,
    shell_line,
    still_runs,
)
from shardwright.launch.job_spec import JobSpec, own_environ
from shardwright.launch.processes import EXITS_VARIABLE, refuse_half_characters, shown
from shardwright.launch.ranks.verdict import WORKER_CRASHED
from shardwright.launch.running_job import Outcome, RunningJob, outcome_of_exits

_TIMEOUT_S = 120.0


def run(
    words: Sequence[str], *, remedy: str, text: str | None = None, environ: Mapping[str, str] | None = None
) -> str:
    try:
        done = subprocess.run(
            words,
            input=text,
            env=None if environ is None else dict(environ),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except FileNotFoundError:
        raise LaunchError(f"there is no program {words[0]} on the PATH. {remedy}") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{' '.join(words)} did not answer within {_TIMEOUT_S:g} s.") from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or "it says nothing"
        raise LaunchError(f"{' '.join(words)} failed with exit code {done.returncode}: {said}")
    return done.stdout


def ask(words: Sequence[str]) -> str | None:
    """The output of a program; None if it fails or does not exist."""
    try:
        return run(words, remedy="")
    except LaunchError:
        return None


_REMEDY = "Run this on a machine from which jobs are submitted to Slurm, or take another engine."
_ADDRESS = r"""scontrol show node -o "$first" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p'"""
_STATE = re.compile(r"\bJobState=(\S+)")
_EXIT_CODE = re.compile(r"\bExitCode=(\d+):(\d+)")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_PLAIN = re.compile(r"[\w@%+=:,./&|*-]*", re.ASCII)
_BY_SIGNAL = frozenset({"CANCELLED", "TIMEOUT", "PREEMPTED", "DEADLINE"})
_ENDED = _BY_SIGNAL | {"COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}
_TERMINATED = 128 + 15
_BEFORE_LIMIT_S = 120
"""The signal may come a minute earlier still; ranks have 30 s to save then."""

_LEAST_S = 600

_ENDS_SAVED = (
    "# Before the end of its time the ranks save: srun passes the signal on to the launchers.",
    "trap 'ends=1; kill -USR1 $!' USR1",
)
# A signal ends a wait; where the process ends meanwhile, another wait has its code.
_WAITED = "while wait $!; code=$?; kill -0 $! 2> /dev/null; do :; done; wait $!; code=$?"
_AGAIN = ('if [ $code = 75 ] && [ -n "$ends" ]; then scontrol requeue "$SLURM_JOB_ID"; fi',)
_NUMBER = "job.number"
"""The file in a job's folder that has the number which Slurm gave it."""


class Slurm:
    """Submits each job with ``sbatch``: one task a node, which starts the ranks of the node.

    Args:
        partition: of the cluster.
        account: that is charged.
        cpus_per_host: cores of each node; None leaves it to the cluster, which may give one core a task.
        options: others of ``sbatch``, by name: ``{"constraint": "a100", "exclusive": None}``.
        setup: lines of shell that run first on the first node, such as ``"module load cuda"``.
        python: the interpreter on the nodes.
        poll_s: how often the state is asked for, in seconds.
        requeue: sends SIGUSR1 to the ranks 2 minutes before the end of the job's time (``max_run``, of at
            least 10 minutes, an option ``time``, or the partition's limit), and queues the job again where
            they have saved, until it is done. Without `Checkpoints` the signal ends them.

    Raises:
        ConfigError: an option is none.
    """

    is_here = False
    sees_files = True

    def __init__(
        self,
        *,
        partition: str | None = None,
        account: str | None = None,
        cpus_per_host: int | None = None,
        options: Mapping[str, str | int | None] | None = None,
        setup: str | Sequence[str] = (),
        python: str = sys.executable,
        poll_s: float = 5.0,
        requeue: bool = False,
    ) -> None:
        self._requeue = requeue
        self._options = {"partition": partition, "account": account}
        self._more_options = {name.replace("_", "-"): value for name, value in (options or {}).items()}
        for name in self._more_options:
            if not _OPTION.fullmatch(name):
                raise ConfigError(
                    f"options have {name!r}, which is no option of sbatch. Write long names without dashes "
                    'before them: options={"constraint": "a100"}.'
                )
        if requeue and "signal" in self._more_options:
            raise ConfigError(
                "requeue=True has the job's script take a signal before the end of its time. Leave the "
                "option signal out, or write what follows it yourself."
            )
        self._cpus = cpus_per_host
        self._setup = [setup] if isinstance(setup, str) else list(setup)
        self._python = python
        self._poll_s = poll_s

    def manifest(self, spec: JobSpec) -> str:
        # SM_HP_LEARNING-RATE is no name to a shell; the launcher of each node sets it.
        variables = {name: value for name, value in spec.variables().items() if is_variable(name)}
        exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        if spec.import_folders:
            folders = shlex.quote(os.pathsep.join(spec.import_folders))
            exports.append(f'export PYTHONPATH={folders}"${{PYTHONPATH:+:$PYTHONPATH}}"')
        cpus = f" --cpus-per-task={self._cpus}" if self._cpus else ""
        script = "\n".join(
            [
                "#!/bin/bash",
                *(_directive(name, value) for name, value in self._sbatch_options(spec).items()),
                *self._setup,
                *exports,
                'hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))',
                'SM_HOSTS=$(printf \'"%s",\' "${hosts[@]}")',
                'export SM_HOSTS="[${SM_HOSTS%,}]"',
                'first="${hosts[0]}"',
                "# Names of nodes need not be names of machines.",
                f'getent hosts "$first" > /dev/null || first=$({_ADDRESS})',
                'endpoint="$first:$((20000 + SLURM_JOB_ID % 10000))"',
                "# By which the ranks know each other. It is made here, so that it stands in no file.",
                f'if [ -z "${SECRET}${SECRET_FILE}" ]; then',
                f"    export {SECRET}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
                "fi",
                *(_ENDS_SAVED if self._requeue else ()),
                "# The first node that fails ends the others.",
                f"srun{cpus} --kill-on-bad-exit=1 bash -c {shlex.quote(self._on_each_node(spec))} - "
                '"$endpoint" &',
                _WAITED,
                f"if [ $code = 0 ] && [ -e {_saved(spec)} ]; then code=75; fi",
                *(_AGAIN if self._requeue else ()),
                "exit $code",
                "",
            ]
        )
        refuse_half_characters(script)
        return script

    def _sbatch_options(self, spec: JobSpec) -> dict[str, str | int | None]:
        options: dict[str, str | int | None] = {
            "job-name": spec.name,
            "nodes": spec.num_hosts,
            "ntasks-per-node": 1,
            "output": _without_patterns(spec_log(spec)),
            "chdir": str(spec.source_dir),
            **{name: value for name, value in self._options.items() if value is not None},
        }
        if self._cpus:
            options["cpus-per-task"] = self._cpus
        if spec.gpus_per_host:
            options["gpus-per-node"] = spec.gpus_per_host
        if spec.max_run_s is not None:
            options["time"] = math.ceil(spec.max_run_s / 60)
        if self._requeue:
            if spec.max_run_s is not None and spec.max_run_s < _LEAST_S:
                raise ConfigError(
                    f"max_run is {spec.max_run_s:g} s, but a job that is queued again saves "
                    f"{_BEFORE_LIMIT_S} s before its time is over, or earlier. Give at least {_LEAST_S}."
                )
            options |= {"signal": f"B:USR1@{_BEFORE_LIMIT_S}", "requeue": None, "open-mode": "append"}
        return {**options, **self._more_options}

    def _on_each_node(self, spec: JobSpec) -> str:
        words = spec.words_of_launcher(
            python=self._python, node_rank=ShellText('"$SLURM_NODEID"'), endpoint=ShellText('"$1"')
        )
        exits = shlex.quote(str(spec.logs / "exits-host"))
        lines = [
            f'export SM_CURRENT_HOST="$SLURMD_NODENAME" {EXITS_VARIABLE}={exits}"$SLURM_NODEID".jsonl',
            f'rm -f "${EXITS_VARIABLE}" {_saved(spec)}  # of this job before it was queued again',
            "trap 'kill -TERM $!' TERM",
            "trap 'kill -USR1 $!' USR1",
            f"{shell_line(words)} &",
            _WAITED,
            "# This is no failure, for which srun would end other nodes: they save as well.",
            f"if [ $code = 75 ]; then : > {_saved(spec)}; code=0; fi",
            "exit $code",
        ]
        return "\n".join(lines)

    def start(self, spec: JobSpec, *, waits: bool) -> RunningJob:
        """Writes the batch script into the job's folder, and submits it."""
        manifest = self.manifest(spec)
        _refuse_a_second(spec)
        script = spec.run_folder / "job.sbatch"
        with prepared_run_folder(spec):
            replace_file(script, manifest)
            spec_log(spec).unlink(missing_ok=True)
            said = run(
                ["sbatch", "--parsable", str(script)], remedy=_REMEDY, environ=own_environ(spec, os.environ)
            )
            # "12" or "12;cluster", after whatever a site's plugins print
            number = said.strip().splitlines()[-1].partition(";")[0] if said.strip() else ""
            if not number.isdecimal():
                raise LaunchError(
                    f"sbatch accepted {script}, but its answer has no number of a job: {said!r}."
                )
            replace_file(spec.run_folder / _NUMBER, number)
        return _SlurmJob(spec, number, poll_s=self._poll_s)

    def __repr__(self) -> str:
        return f"Slurm({', '.join(f'{name}={value!r}' for name, value in self._options.items())})"


class _SlurmJob(RunningJob):
    def __init__(self, spec: JobSpec, number: str, *, poll_s: float) -> None:
        super().__init__(spec, is_limited=True, asks_every_s=poll_s)
        self.number = number
        self._last_state = ""
        self._is_held = False

    def _has_ended(self) -> bool:
        found = ask(["squeue", "--noheader", "--jobs", self.number, "--format", "%T %r"])
        state = (found or "").strip()
        if state and state != self._last_state:
            self._last_state = state
            self._note(f"Slurm job {self.number}: {state}")
        if state.startswith("PENDING") and "requeued" in state and "held" in state:
            self._is_held = True  # it would wait for ever
            ask(["scancel", self.number])
            return True
        # A job that has just ended is in the queue for a while.
        return not state or state.split()[0] in _ENDED

    def _ask_to_stop(self) -> None:
        ask(["scancel", self.number])

    def _outcome(self) -> Outcome:
        if self._is_held:
            return ENVIRONMENT, (
                f"Slurm could not start job {self.number} on its nodes, and would hold it until somebody "
                f"releases it ({self._last_state}): it was cancelled. The log of slurmd there says why."
            )
        state, code = self._end()
        log = spec_log(self.spec)
        if state == "COMPLETED":
            return outcome_of_exits(self.spec, otherwise=0)
        if not state and list(self.spec.logs.glob("exits-host*.jsonl")):
            return outcome_of_exits(self.spec, otherwise=0)
        if not state:
            return ENVIRONMENT, (
                f"Slurm knows nothing of job {self.number} any more, and its launcher left nothing in "
                f"{self.spec.logs}. Check that the nodes see this folder."
            )
        exit_code, text = outcome_of_exits(self.spec, otherwise=code or WORKER_CRASHED, log_files=[log])
        return exit_code, f"Slurm job {self.number} ended as {state}. {text}"

    def _end(self) -> tuple[str, int]:
        """The state and the exit code, from the accounting, or from the controller where there is none."""
        found = ask(
            ["sacct", "--noheader", "--parsable2", "-X", "--jobs", self.number, "-o", "State,ExitCode"]
        )
        if found and "|" in found:
            state, _, codes = found.strip().splitlines()[0].partition("|")
            return _with_code(state, *codes.partition(":")[::2])
        found = ask(["scontrol", "show", "job", "--oneliner", self.number]) or ""
        state_match, code_match = _STATE.search(found), _EXIT_CODE.search(found)
        if state_match is None or code_match is None:
            return "", 0
        return _with_code(state_match[1], code_match[1], code_match[2])

    def _log_files(self) -> Sequence[Path]:
        return [spec_log(self.spec)]


def _refuse_a_second(spec: JobSpec) -> None:
    """Lets no other job into the folder of one that Slurm has still to do with."""
    path = spec.run_folder / _NUMBER
    if not path.exists():
        return
    file = UserFile(path, what="", error=ConfigError, advice="Remove it, or give the job another name")
    number = file.read_text().strip()
    if not number.isdecimal():
        raise file.refused(f"is {shown(number)}, but it must be the number of a job")
    # Its name as well: numbers begin anew with each installation of Slurm.
    state = ask(["squeue", "--noheader", "--jobs", number, "--name", spec.name, "--format", "%T"])
    if state and state.strip() and state.strip() not in _ENDED:
        raise still_runs(spec, f"Slurm job {number}, {state.strip()}: scancel {number} stops it")


def _saved(spec: JobSpec) -> str:
    """The file that says so, as a word of a shell."""
    return shlex.quote(str(spec.logs / "saved"))


def spec_log(spec: JobSpec) -> Path:
    """The log of the batch script."""
    return spec.logs / "slurm.log"


def _directive(name: str, value: str | int | None) -> str:
    """A line of the batch script; sbatch reads quotes and backslashes in it somewhat as a shell does."""
    if value is None:
        return f"#SBATCH --{name}"
    text = str(value)
    if "\n" in text or "\r" in text:
        raise ConfigError(
            f"--{name} of sbatch is {text!r}, but a batch script has it in one line. Rename what it names."
        )
    if _PLAIN.fullmatch(text):
        return f"#SBATCH --{name}={text}"
    escaped = text.replace("\\", r"\\").replace('"', r"\"")
    return f'#SBATCH --{name}="{escaped}"'


def _without_patterns(path: Path) -> str:
    """A path in which Slurm fills in nothing."""
    if "\\" in str(path):
        raise ConfigError(
            f"the job's log would be {path}, but Slurm leaves out backslashes there. Set output_path to a "
            "folder without one."
        )
    return str(path).replace("%", "%%")


def _with_code(state: str, code: str, signal: str) -> tuple[str, int]:
    state = state.split()[0]  # "CANCELLED by 0"
    if state in _BY_SIGNAL:
        return state, _TERMINATED
    return state, int(code) if code != "0" or signal in ("", "0") else 128 + int(signal)
