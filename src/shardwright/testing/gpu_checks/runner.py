"""Runs checks one after the other, each in processes of its own and in a time of its own."""

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.comm._private import DEVICE_VARIABLE
from shardwright.testing.gpu_checks.table import CHECKS, EVERY_GPU, Check
from shardwright.testing.gpu_checks.training import Skipped
from shardwright.testing.job import Outcome, first_cause_first
from shardwright.testing.ranks import run_ranks_outcomes

State = Literal["pass", "fail", "skipped"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Where checks run.

    Attributes:
        device: ``cuda`` or ``cpu``.
        num_gpus: GPUs of this host.
    """

    device: str
    num_gpus: int

    def ranks_of(self, check: Check) -> int:
        """Ranks that a check gets here."""
        every = self.num_gpus if self.device == "cuda" else 2
        return every if check.ranks == EVERY_GPU else check.ranks

    def refuses(self, check: Check) -> str:
        """Why a check cannot run here; empty where it can."""
        if self.device == "cpu":
            return "it needs a GPU" if check.needs_gpu else ""
        ranks = self.ranks_of(check)
        if check.ranks == EVERY_GPU and ranks == 1:
            return "it needs 2 GPUs"
        if ranks > self.num_gpus and not check.shares_card:
            return f"it needs {ranks} GPUs: NCCL takes one rank on each"
        return ""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a check; the text has its figures, the reason, or the last line of what went wrong."""

    check: Check
    state: State
    text: str
    seconds: float = 0.0


def run_checks(machine: Machine, checks: Sequence[Check] = CHECKS) -> Iterator[Result]:
    """Runs checks, and gives what became of each as soon as it is known."""
    with tempfile.TemporaryDirectory(prefix="shardwright-checks-") as cache:
        for check in checks:
            reason = machine.refuses(check)
            yield Result(check, "skipped", reason) if reason else _result(machine, check, cache)


def _result(machine: Machine, check: Check, cache: str) -> Result:
    env = {"SHARDWRIGHT_CACHE": cache, "TOKENIZERS_PARALLELISM": "false"}
    if machine.device == "cpu":
        env[DEVICE_VARIABLE] = "cpu"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcomes = run_ranks_outcomes(
                _called,
                machine.ranks_of(check),
                check,
                timeout_s=check.timeout_s,
                grace_s=5.0,
                env=env,
                init_process_group=False,
            )
    except Exception as error:  # the rest still runs
        return Result(check, "fail", f"{type(error).__name__}: {error}".splitlines()[0])
    seconds = max(outcome.seconds for outcome in outcomes)
    failed = first_cause_first(outcomes)
    if failed:
        return Result(check, "fail", _cause(failed[0], check), seconds)
    state, text = outcomes[0].value
    return Result(check, state, text, seconds)


def _called(call: Callable[[], str]) -> tuple[State, str]:
    """On each rank."""
    try:
        return "pass", call()
    except Skipped as reason:
        return "skipped", str(reason)


def _cause(outcome: Outcome, check: Check) -> str:
    rank = f"rank {outcome.rank}: " if check.ranks != 1 else ""
    said = outcome.stderr.strip().splitlines()[-1:] if outcome.error is None else []
    limit = [f"within {check.timeout_s:g} s"] if outcome.stopped == "timeout" else []
    return rank + "; ".join([outcome.cause, *limit, *said])
