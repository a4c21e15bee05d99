"""The supervisor of one rank: ``python -m shardwright.launch.ranks.worker``.

::

    agent ──signal──> supervisor ──the same, once──> script       in a process group of its own
                      supervisor <──stdout, stderr── script
                        │  │  └──> console, with the rank before each line
                        │  └─────> logs/rank<N>.log
                        └────────> the exit log: when and how the script ended

torchelastic's agent starts it. It imports no torch, so it starts at once and costs little. It never outlives
the agent, and the script never outlives it. A script that ignores a signal is killed: after 5 s if another
worker has failed (the script can hardly get anywhere without that one), 1 s if that one has ended because the
script hangs, or after a second Ctrl-C or another signal (somebody is impatient), otherwise after the grace
that the user granted for saving.
"""

import argparse
import contextlib
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from shardwright.flight_record import PAGE_VARIABLE, keep, read_beat, read_progress
from shardwright.launch.processes import (
    SAVED_AND_REQUEUE,
    ExitLog,
    WorkerExit,
    die_with_parent,
    kill_group,
    without_too_long,
)
from shardwright.launch.ranks.rank_environment import rank_variables
from shardwright.launch.ranks.standby import ForkedScript, forked
from shardwright.launch.ranks.verdict import failure_report, named_as_hung
from shardwright.launch.worker_output import Tee, last_words

Script = subprocess.Popen[bytes] | ForkedScript
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_GRACE_AFTER_FAILURE_S = 5.0
_GRACE_AFTER_SECOND_SIGNAL_S = 1.0
_GRACE_OF_A_RANK_THAT_HANGS_S = 1.0
_SAME_SIGNAL_S = 10.0
_POLL_S = 0.5
_DRAIN_S = 0.5


class _Supervisor:
    """Runs one script as one rank."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        exits: ExitLog,
        logs: Path,
        grace_s: float,
        standby: Path | None = None,
        goes_on: bool = False,
    ) -> None:
        self._command = command
        self._environ = {**environ, **without_too_long(rank_variables(environ))}
        self._rank = int(environ["RANK"])
        self._local_rank = int(environ["LOCAL_RANK"])
        self._attempt = int(environ["TORCHELASTIC_RESTART_COUNT"])
        self._life = exits.next_life(self._local_rank)
        self._num_attempts = int(environ["TORCHELASTIC_MAX_RESTARTS"]) + 1
        self._progress = exits.progress_file(self._local_rank)
        self._environ[PAGE_VARIABLE] = str(self._progress)
        self._prefix = b"" if environ["WORLD_SIZE"] == "1" else f"[rank {self._rank}] ".encode()
        self._exits = exits
        self._log = logs / f"rank{self._rank}.log"
        self._grace_s = grace_s
        self._agent_pid = os.getppid()
        self._agent_is_gone = False
        self._signal_number: int | None = None
        self._signalled_at_s = 0.0
        self._patience_s = 0.0
        self._kill_at_s: float | None = None
        self._was_killed = False
        self._wakeup_fd, self._wakeup_write_fd = os.pipe()
        self._standby = standby
        self._goes_on = goes_on

    def run(self) -> int:
        """Runs the script to its end; returns the exit code that the agent should see."""
        if self._life > 0 and self._local_rank == 0:
            self._say_why_restarted()
        self._catch_signals()
        with self._open_log() as log:
            started_at_s = time.monotonic()
            script = self._start()
            assert script.stdout is not None
            assert script.stderr is not None
            out = Tee(script.stdout.fileno(), console_fd=1, prefix=self._prefix, log=log, holds_back=False)
            err = Tee(script.stderr.fileno(), console_fd=2, prefix=self._prefix, log=log, holds_back=True)
            while (code := script.poll()) is None:
                self._wait(script, (out, err))
            ended_at_s = time.monotonic()
            self._end(script, (out, err))
        steps, has_saved = self._progress_told()
        if (
            has_saved and self._signal_number is not None
        ):  # a second signal, or the grace, has cut the end short
            code = SAVED_AND_REQUEUE
        worker_exit = WorkerExit(
            rank=self._rank,
            local_rank=self._local_rank,
            life=self._life,
            exit_code=code,
            at_s=ended_at_s,
            seconds=ended_at_s - started_at_s,
            signal_number=self._signal_number,
            was_killed=self._was_killed,
            patience_s=self._patience_s,
            error=last_words(err.tail) if code else "",
            steps=steps,
            world_size=int(self._environ["WORLD_SIZE"]),
            log=str(self._log),
        )
        if self._agent_is_gone:
            self._exits.remove()  # nobody will read it, nor clear it away
        else:
            with contextlib.suppress(FileNotFoundError):  # the launcher has just gone, with the folder
                self._exits.append(worker_exit)
        return self._code_for_agent(worker_exit)

    def _catch_signals(self) -> None:
        for descriptor in (self._wakeup_fd, self._wakeup_write_fd):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._wakeup_write_fd)
        for number in (*_FORWARDED, signal.SIGCHLD):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: the script has it ignored, too
            signal.signal(number, lambda *_: None)  # the number arrives through the pipe

    def _open_log(self) -> BinaryIO:
        log = self._log.open("ab")
        if log.tell() > 0:  # a restart, or a run that is continued under its name
            log.write(f"--- attempt {self._attempt + 1}, {datetime.now():%Y-%m-%d %H:%M:%S}\n".encode())
        return log

    def _start(self) -> Script:
        if self._standby is not None and (script := forked(self._standby, self._command[2:], self._environ)):
            return script
        own_pid = os.getpid()
        return subprocess.Popen(
            self._command,
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # or a signal to our group would reach the script twice
            preexec_fn=lambda: die_with_parent(own_pid),
        )

    def _wait(self, script: Script, tees: tuple[Tee, Tee]) -> None:
        by_fd = {tee.pipe_fd: tee for tee in tees if tee.is_open}
        due = [at_s for at_s in (self._kill_at_s, *(tee.release_at_s for tee in tees)) if at_s is not None]
        wait_s = max(0.0, min([_POLL_S, *(at_s - time.monotonic() for at_s in due)]))
        ends = [script.fileno()] if isinstance(script, ForkedScript) else []  # of a child, a signal tells
        ready, _, _ = select.select([self._wakeup_fd, *by_fd, *ends], [], [], wait_s)
        for descriptor in by_fd.keys() & set(ready):
            by_fd[descriptor].copy()
        for tee in tees:
            tee.release_if_due()
        if self._wakeup_fd in ready:
            for number in os.read(self._wakeup_fd, 64):
                self._forward(script, number)
        if os.getppid() != self._agent_pid and not self._agent_is_gone:
            self._agent_is_gone = True
            self._forward(script, signal.SIGTERM)
            self._kill_at_s = min(self._kill_at_s or math.inf, time.monotonic() + _GRACE_AFTER_FAILURE_S)
        if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
            self._was_killed = True
            kill_group(script.pid)

    def _forward(self, script: Script, number: int) -> None:
        if number not in _FORWARDED or self._is_repeated(number):
            return
        # To the script alone: workers of its data loaders would die of it, while it saves. What is left of
        # the group is killed at the end.
        with contextlib.suppress(ProcessLookupError):
            os.kill(script.pid, number)
        self._patience_s = self._patience_from_now_s()
        self._kill_at_s = time.monotonic() + self._patience_s
        if self._signal_number is None:
            self._signal_number, self._signalled_at_s = number, time.monotonic()

    def _is_repeated(self, number: int) -> bool:
        """Whether one signal comes twice: a scheduler tells all processes, and the agent tells them again."""
        first = self._signal_number
        is_the_same = first not in (None, signal.SIGINT) and number in (first, signal.SIGTERM)
        return is_the_same and time.monotonic() - self._signalled_at_s < _SAME_SIGNAL_S

    def _patience_from_now_s(self) -> float:
        """The seconds that the script may take from this signal on."""
        if self._signal_number is not None:
            return _GRACE_AFTER_SECOND_SIGNAL_S
        failed = [other for other in self._exits.of_life(self._life) if other.exit_code != 0]
        if any(self._rank in named_as_hung(other) for other in failed):
            return _GRACE_OF_A_RANK_THAT_HANGS_S
        return _GRACE_AFTER_FAILURE_S if failed else self._grace_s

    def _end(self, script: Script, tees: tuple[Tee, Tee]) -> None:
        if script.returncode != 0:
            kill_group(script.pid)  # what the script started and did not end
        limit_s = time.monotonic() + _DRAIN_S
        # What it left running may hold the pipes open, hence the limit.
        while (pipes := [tee.pipe_fd for tee in tees if tee.is_open]) and time.monotonic() < limit_s:
            select.select(pipes, [], [], 0.05)
            for tee in tees:
                while tee.is_open and tee.copy():
                    pass
        for tee in tees:
            tee.finish()
            if script.returncode != 0:
                tee.discard_held()  # the report shows it
            tee.release()

    def _code_for_agent(self, worker_exit: WorkerExit) -> int:
        """A worker that saved and asks to be requeued must not make the agent restart all of them at once.

        Unless another host was asked to end, and this one is to go on without it.
        """
        codes = [other.exit_code for other in self._exits.of_life(self._life)]
        if SAVED_AND_REQUEUE in codes:
            return SAVED_AND_REQUEUE if self._goes_on and self._signal_number is None else 0
        return worker_exit.exit_code if worker_exit.exit_code >= 0 else 128 - worker_exit.exit_code

    def _progress_told(self) -> tuple[int | None, bool]:
        """The steps that the script has noted, and whether it has saved; its page goes to the run folder."""
        try:
            page = self._progress.read_bytes()
            self._progress.unlink()  # for a next life
        except OSError:
            return None, False
        if read_beat(page) is None:
            return None, False
        keep(self._log.parent.parent, self._rank, page)
        return read_progress(page)

    def _say_why_restarted(self) -> None:
        before = self._exits.of_life(self._life - 1)
        if self._goes_on and any(other.exit_code == SAVED_AND_REQUEUE for other in before):
            report = "another host has gone, or come; the ranks have saved\n"
        else:
            report = f"{failure_report(before)}\n" if any(other.exit_code for other in before) else ""
        text = f"{report}shardwright run: restarted, attempt {self._attempt + 1} of {self._num_attempts}\n"
        os.write(2, text.encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line that `shardwright.launch.ranks.agent` writes."""
    parser = argparse.ArgumentParser(prog="python -m shardwright.launch.ranks.worker")
    parser.add_argument("--exits", required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("--standby", type=Path)
    parser.add_argument("--goes-on", action="store_true", help="without hosts that end")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    supervisor = _Supervisor(
        options.command[1:],  # after "--"
        environ=os.environ,
        exits=ExitLog(options.exits),
        logs=options.logs,
        grace_s=options.grace_s,
        standby=options.standby,
        goes_on=options.goes_on,
    )
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
