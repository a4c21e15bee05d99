"""The verdict on a run: who failed first, why, and the matching exit code."""

import re
import signal
from collections.abc import Sequence

from shardwright import errors
from shardwright.comm.message_names import names_a_lost_peer
from shardwright.exit_codes import FAILED, HANG, exit_code_of
from shardwright.launch.processes import SAVED_AND_REQUEUE, WorkerExit
from shardwright.launch.worker_output import begins_last_words, fold
from shardwright.quantities import format_seconds

WORKER_CRASHED = 5
_SAME = "with the same error"
_NOTICED = "noticed it, and ended"
_ENDED = "killed, because"
_CUT_OFF = "cannot reach host"
_MANY = 4
"""So many ranks that ended alike share a line."""
_LONGEST = 160
"""Characters of the error of another rank; its log has all."""
_FROM_PEER = re.compile(r"(?:receiving from|sending to) rank (\d+) failed")
_WAIT_FOR_EACH_OTHER = "All ranks of a group make the same collectives"
_HUNG = re.compile(
    r"(?:receiving from|sending to|waiting for a value of) rank (\d+) failed: no answer"
    r"|[Rr]ank (\d+) (?:has not|did not) come within|rank (\d+) hangs: "
)
_LATE = re.compile(
    r"PeerTimeoutError|left without a word|Timed out waiting|have not come within", re.IGNORECASE
)
"""Of an error that may be of a rank that hangs, whether it names one or not."""
# Errors of others, and what a script does about them with us.
_REMEDIES = {
    # Of PyTorch on a machine, or in a build, without CUDA.
    re.compile(
        r"Torch not compiled with CUDA enabled|'torch\._C' has no attribute '_cuda_|"
        r"No CUDA GPUs are available|Found no NVIDIA driver|"
        r"torch\.cuda\.is_available\(\) is False|no NVIDIA GPU detected"
    ): (
        "It asks for CUDA, which is not here. In CPU mode scripts that are written for it run on CPUs: "
        'shardwright run --device cpu, Estimator(..., device="cpu"), or python -m shardwright.cpu_mode.'
    ),
    re.compile(r"No module named 'horovod\b"): (
        "It imports Horovod, which is not here. Have a part of its names over Shardwright, once in this "
        "environment: python -m smdistributed.horovod install (after pip install -e compat in a checkout)."
    ),
    re.compile(r"No module named 'torch\.sagemaker\b"): (
        "It is written for version 2 of SageMaker's model parallel library. Have a part of its names over "
        "PyTorch's FSDP, once in this environment: python -m smdistributed.sagemaker install (after pip "
        "install -e compat in a checkout). docs/coming_from.md has what Shardwright has in their place."
    ),
    re.compile(r"trying to initialize the default process group twice"): (
        "sw.init() has made the process group. Leave init_process_group out, or call it before sw.init()."
    ),
    re.compile(r"object has no attribute '(?:reduce_mean|concat|stack)'"): (
        "A step function gives a StepOutput for each tensor that it returns, also inside of a dictionary: "
        'train_step(...)["loss"].reduce_mean(). What is no tensor (loss.item()) becomes a list with an '
        "item for each microbatch, and a function without return gives None."
    ),
    re.compile(r"\.grad\b.*\n.*[\^~]\n?(?:AttributeError: 'NoneType' object|TypeError: .*\bNoneType\b)"): (
        "A rank has the gradients of its own parameters; grad of the others is None. Those of this rank: "
        "model.local_parameters(). The norm over all: torch.nn.utils.clip_grad_norm_(..., math.inf)."
    ),
    re.compile(r"^bdb\.BdbQuit|^EOFError: EOF when reading a line", re.MULTILINE): (
        "breakpoint() and input() need a terminal, which ranks of a launcher have not. One rank has it: "
        "python train.py"
    ),
    re.compile(r"'(?!float|int|list|tuple|dict|NoneType|Tensor)\w+' object has no attribute 'backward'"): (
        "model.backward(loss) is of what sw.DistributedModel returns: model = sw.DistributedModel(model). "
        "Hand that to the step function."
    ),
}
# Errors of ours that are defined elsewhere, by the names in tracebacks: what they are in our tree.
_DEFINED_ELSEWHERE: dict[str, type[errors.ShardwrightError]] = {
    "smdistributed.modelparallel.backend.exceptions.NotInitializedError": errors.UsageError,
    "smdistributed.modelparallel.torch.exceptions.NotThereYetError": errors.UsageError,
}
_PASSED_ON = frozenset({3, 6, 7, 8, SAVED_AND_REQUEUE})


def first_cause_first(exits: Sequence[WorkerExit]) -> list[WorkerExit]:
    """Sorts the workers that failed: causes, those that lost a peer, those that were told to stop."""
    failed = [worker_exit for worker_exit in exits if worker_exit.exit_code != 0]
    ended_by_another = {rank for each in failed if each.exit_code == HANG for rank in named_as_hung(each)}

    def place(worker_exit: WorkerExit) -> tuple[int, float]:
        distance = 2 if worker_exit.rank in ended_by_another else _distance_from_cause(worker_exit)
        return distance, worker_exit.at_s

    return sorted(failed, key=place)


def named_as_hung(worker_exit: WorkerExit) -> set[int]:
    """The rank that this one has waited for in vain, if it says so."""
    hung = _HUNG.search(_error_in_a_line(worker_exit.error))
    return {int(rank) for rank in hung.groups() if rank} if hung else set()


def _distance_from_cause(worker_exit: WorkerExit) -> int:
    if worker_exit.exit_code in (SAVED_AND_REQUEUE, HANG):
        return 0
    if _was_stopped(worker_exit):
        return 2
    return 1 if names_a_lost_peer(worker_exit.error) else 0


def _was_stopped(worker_exit: WorkerExit) -> bool:
    return worker_exit.signal_number is not None and not _had_failed_before(worker_exit)


def _had_failed_before(worker_exit: WorkerExit) -> bool:
    """Whether it was ending on an error of its own when the signal came: that takes Python some time."""
    words = worker_exit.error
    return words.startswith("Traceback") and not _error_in_a_line(words).startswith("KeyboardInterrupt")


def exit_code(exits: Sequence[WorkerExit]) -> int:
    """The launcher's exit code: 0, or that of the first cause where it has a meaning, else 5."""
    failed = first_cause_first(exits)
    if not failed:
        return 0
    first = failed[0]
    if first.exit_code in _PASSED_ON:
        return first.exit_code
    kind = _error_of_ours(first.error) if _own_code(first) == FAILED else None
    code = FAILED if kind is None else exit_code_of(kind)
    return WORKER_CRASHED if code == FAILED else code


_AT_EVERY_START = (errors.ConfigError, errors.PlanError, errors.InfeasiblePlanError, errors.ScheduleError)


def why_not_again(before: Sequence[WorkerExit], now: Sequence[WorkerExit]) -> str:
    """Why another start would end as the last one has; empty where it may not.

    Args:
        before: the ends of the life before the last one; none if there was one life.
    """
    failed = first_cause_first(now)
    if not failed or _was_stopped(failed[0]) or failed[0].exit_code == SAVED_AND_REQUEUE:
        return ""
    first = failed[0]
    kind = _error_of_ours(first.error) if _own_code(first) == FAILED else None
    if kind in _AT_EVERY_START or (kind is errors.UsageError and not first.steps):
        return f"a {kind.__name__} comes again at every start"
    causes = first_cause_first(before)
    if not causes or _distance_from_cause(first) or not first.steps:
        return ""  # without a step, what failed may be a file system that is back in a moment
    # Not all last words: a rank that was forked may have other frames, and words of its own above them.
    earlier, last = ((e.rank, _own_code(e), _raised(e.error), e.steps) for e in (causes[0], first))
    again = f"rank {first.rank} has failed in the same way after step {first.steps} twice"
    return again if earlier == last else ""


def _own_code(worker_exit: WorkerExit) -> int:
    """Its exit code; that of errors, where it was ending on one of its own as the launcher's signal came."""
    return worker_exit.exit_code if worker_exit.signal_number is None else FAILED


def _error_of_ours(last_words: str) -> type[errors.ShardwrightError] | None:
    """The class of the error with which a traceback ends, if it is one of Shardwright's."""
    full_name = _raised(last_words).partition(":")[0]
    if full_name in _DEFINED_ELSEWHERE:
        return _DEFINED_ELSEWHERE[full_name]
    module, _, name = full_name.rpartition(".")
    kind = getattr(errors, name, None) if module == errors.__name__ and name in errors.__all__ else None
    return kind if isinstance(kind, type) else None


def _raised(last_words: str) -> str:
    """The line below the last frame of a traceback, or "".

    An error may have several lines, and name other errors in them; a rank may write more before it ends.
    """
    lines = last_words.splitlines()
    inside = [index for index, line in enumerate(lines) if line.lstrip().startswith("File ")]
    return next((line for line in lines[inside[-1] + 1 :] if line[:1].strip()), "") if inside else ""


def _to_the_error(last_words: str) -> list[str]:
    """The lines up to the error, or the last one."""
    lines, error = last_words.splitlines(), _error_in_a_line(last_words)
    return lines[: lines.index(error) + 1] if error in lines else [error]


def _error_in_a_line(last_words: str) -> str:
    return _raised(last_words) or (last_words.splitlines() or [""])[-1]


def failure_report(exits: Sequence[WorkerExit]) -> str:
    """Tells which worker failed first, how, its traceback and its log; of the others one line each."""
    first, *others = first_cause_first(exits)
    lines = [f"{_headline(first, exits)} after {format_seconds(first.seconds)}: {_cause(first)}"]
    if first.error and not begins_last_words(first.error):
        lines.append("  its stderr ends with:")
    is_for_users = _error_of_ours(first.error) is not None
    lines += [f"  {line}" for line in fold(first.error, to_the_end=is_for_users).splitlines()]
    hung = _hung(first, exits)
    was_ended = any(_consequence(other, first, hung).startswith(_ENDED) for other in others)
    if names_a_lost_peer(first.error) and not was_ended and _WAIT_FOR_EACH_OTHER not in first.error:
        lines.append(f"  {_about_lost_peer(first, exits)}")
    error = "\n".join(_to_the_error(first.error)[-3:])  # with the line of the script
    lines += [f"  {remedy}" for missing, remedy in _REMEDIES.items() if missing.search(error)]
    lines.append(f"  log: {first.log}")
    alike: dict[str, list[WorkerExit]] = {}
    for other in others:
        alike.setdefault(_consequence(other, first, hung), []).append(other)
    for consequence, group in alike.items():
        if len(group) < _MANY and consequence == _NOTICED:
            lines += [f"rank {o.rank} {_NOTICED}; log: {o.log}" for o in group]
        elif len(group) < _MANY and consequence == _SAME:
            lines += [f"rank {o.rank} failed {_later(o, first)} {_SAME}; log: {o.log}" for o in group]
        elif len(group) < _MANY:
            lines += [f"rank {o.rank}, {_later(o, first)}: {consequence}; log: {o.log}" for o in group]
        else:
            ranks = ", ".join(str(rank) for rank in sorted(o.rank for o in group))
            soonest = min(group, key=lambda o: o.at_s)
            how = f"failed {consequence}" if consequence == _SAME else consequence
            lines.append(
                f"{len(group)} ranks ({ranks}), the first of them {_later(soonest, first)}: {how}; "
                f"logs beside that of rank {first.rank}"
            )
    return "\n".join(lines)


def _headline(first: WorkerExit, exits: Sequence[WorkerExit]) -> str:
    """Names the rank that hangs, or left too early, and not the one that has waited for it."""
    if names_a_lost_peer(first.error) and (done := _done_before(first, exits)):
        return f"rank {done} ended early, with exit code 0: rank {first.rank} needed it, and ended"
    hung = _hung(first, exits)
    if hung is None:
        return f"rank {first.rank} failed first,"
    return f"rank {hung} hangs: rank {first.rank} waited for it in vain, and ended"


def _hung(first: WorkerExit, exits: Sequence[WorkerExit]) -> int | None:
    """The rank that has kept the first one waiting, perhaps behind others that waited for it themselves."""
    error = _error_in_a_line(first.error)
    if not _LATE.search(error) or _CUT_OFF in error or _WAIT_FOR_EACH_OTHER in error:
        return None
    if _done_before(first, exits):
        return None
    by_rank, seen, named = {each.rank: each for each in exits}, {first.rank}, named_as_hung(first)
    hung = next(iter(named), None)
    if hung == first.rank:
        return None  # of itself: it is alone in a collective
    while hung in by_rank and hung not in seen:
        seen.add(hung)
        behind = named_as_hung(by_rank[hung]) - {hung}
        hung = next(iter(behind - seen), hung)
    end = None if hung is None else by_rank.get(hung)
    if len(exits) < first.world_size or (end is not None and _ended_unheard(end)):
        return hung
    # All ranks are here: who could still say why it ended did not hang.
    unheard = [each.rank for each in exits if each is not first and _ended_unheard(each)]
    return unheard[0] if len(unheard) == 1 else hung


def _ended_unheard(worker_exit: WorkerExit) -> bool:
    """Whether it was ended by others, and has not said a word of its own."""
    by_others = worker_exit.signal_number is not None or worker_exit.exit_code == -signal.SIGKILL
    return by_others and not _had_failed_before(worker_exit)


def _done_before(first: WorkerExit, exits: Sequence[WorkerExit]) -> str:
    """The ranks that had ended well by then."""
    return ", ".join(str(e.rank) for e in exits if e.exit_code == 0 and e.at_s <= first.at_s)


def _about_lost_peer(first: WorkerExit, exits: Sequence[WorkerExit]) -> str:
    """Says where to look: a peer of this host has its own line."""
    if done := _done_before(first, exits):
        return (
            f"It lost a peer that had come to its end: rank {done} ended with exit code 0 before. "
            "All ranks must run the same steps and make the same calls."
        )
    named = _FROM_PEER.findall(first.error)
    here = {e.rank for e in exits} - {first.rank}
    if named and int(named[-1]) in here:
        return f"It lost rank {named[-1]}, of which the line below tells; look into its log."
    if 1 < first.world_size == len(exits):
        return "It lost a peer: look for the cause in the logs of the others."
    return "It lost a peer: look for the cause in the reports of the other hosts."


def _later(other: WorkerExit, first: WorkerExit) -> str:
    after_s = other.at_s - first.at_s
    return f"{format_seconds(abs(after_s))} {'later' if after_s >= 0 else 'before'}"


def _cause(worker_exit: WorkerExit) -> str:
    if worker_exit.exit_code == SAVED_AND_REQUEUE:
        return "it saved its state and asks to be started again (exit code 75)"
    if worker_exit.exit_code >= 0:
        return f"exit code {worker_exit.exit_code}"
    if worker_exit.signal_number is not None and _had_failed_before(worker_exit):
        return (
            f"an error of its own (it was about to end when {_signal_name(worker_exit.signal_number)} came)"
        )
    name = _signal_name(-worker_exit.exit_code)
    if -worker_exit.exit_code == signal.SIGKILL and worker_exit.signal_number is None:
        # The kernel leaves no other trace in the process.
        return f"killed by {name} (perhaps out of memory: see the kernel's log)"
    return f"killed by {name}"


def _consequence(worker_exit: WorkerExit, first: WorkerExit, hung: int | None) -> str:
    if worker_exit.rank == hung and worker_exit.exit_code == -signal.SIGKILL:
        return f"{_ENDED} rank {first.rank} found that it hangs"
    if (number := worker_exit.signal_number) is not None and worker_exit.was_killed:
        return f"did not end on {_signal_name(number)}, so it was killed"
    if number is not None and _was_stopped(worker_exit):
        return f"stopped by {_signal_name(number)}"
    error = _error_in_a_line(worker_exit.error)
    if error and error == _error_in_a_line(first.error):
        return _SAME
    if f"PeerLostError: rank {first.rank} failed first (" in error:
        return _NOTICED
    if len(error) > _LONGEST:
        error = f"{error[:_LONGEST]} ..."
    return " - ".join(filter(None, (_cause(worker_exit), error)))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"
