"""Who failed first, as literals."""

import contextlib
import signal
from dataclasses import replace
from pathlib import Path

import pytest

import shardwright
from shardwright.launch.processes import ExitLog, WorkerExit
from shardwright.launch.ranks.verdict import exit_code, failure_report, first_cause_first, why_not_again
from shardwright.launch.worker_output import fold, last_words
from shardwright.observe.goodput import Spent

BOOM = "Traceback (most recent call last):\n  File 'train.py', line 3\nValueError: boom"
PEER = (
    "Traceback (most recent call last):\n  File 'train.py', line 9\nRuntimeError: Connection closed by peer"
)


def ended(rank, exit_code, at_s=10.0, **changes):
    return WorkerExit(
        **{
            "rank": rank,
            "local_rank": rank,
            "life": 0,
            "exit_code": exit_code,
            "at_s": at_s,
            "seconds": at_s - 5.0,
            "log": f"logs/rank{rank}.log",
            **changes,
        }
    )


def test_a_rank_that_lost_its_peer_comes_after_the_peer_even_if_it_was_quicker():
    exits = [ended(0, 1, 10.0, error=PEER), ended(1, 1, 10.2, error=BOOM), ended(2, 0)]
    assert [worker_exit.rank for worker_exit in first_cause_first(exits)] == [1, 0]


def test_a_rank_that_was_told_to_stop_comes_last():
    exits = [ended(0, -15, 9.0, signal_number=15), ended(1, 1, 9.5, error=PEER), ended(2, -9, 9.9)]
    assert [worker_exit.rank for worker_exit in first_cause_first(exits)] == [2, 1, 0]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], 0),
        ([0, 1], 5),
        ([0, -9], 5),
        ([2, 0], 5),
        ([3, 3], 3),
        ([0, 6], 6),
        ([7, 0], 7),
        ([0, 8], 8),
        ([75, 75], 75),
    ],
)
def test_the_exit_code_is_that_of_the_first_cause_where_it_means_something(codes, expected):
    assert exit_code([ended(rank, code) for rank, code in enumerate(codes)]) == expected


@pytest.mark.parametrize(
    ("last_line", "expected"),
    [
        ("shardwright.errors.InfeasiblePlanError: nothing fits in 11.7 KiB a rank.", 3),
        ("shardwright.errors.ConfigError: microbatchs is not a setting.", 2),
        ("shardwright.errors.TraceError: model.py:3: no.\nshardwright.errors.InfeasiblePlanError: x", 2),
        ("shardwright.errors.LaunchError: rank 0 of 2 could not join", 4),
        ("shardwright.errors.ShardwrightError: anything else", 5),
        ("shardwright.errors.UsageError", 2),
        ("smdistributed.modelparallel.backend.exceptions.NotInitializedError: smp.init() was not called.", 2),
        ("smdistributed.modelparallel.torch.exceptions.NotThereYetError: tensor parallelism", 2),
        ("somebody.errors.InfeasiblePlanError: not ours", 5),
        ("ValueError: shardwright.errors.InfeasiblePlanError: in a text", 5),
    ],
)
def test_an_error_of_ours_has_its_own_exit_code(last_line, expected):
    text = BOOM.replace("ValueError: boom", "    raise made[0]\n" + last_line)
    assert exit_code([ended(0, 1, error=text), ended(1, 1, 9.0, error=PEER)]) == expected


def test_a_script_that_leaves_with_2_has_crashed_whatever_it_printed():
    assert exit_code([ended(0, 2, error="shardwright.errors.InfeasiblePlanError: no traceback")]) == 5


def test_saving_and_leaving_is_the_cause_of_what_the_others_lost():
    assert exit_code([ended(0, 1, 9.0, error=PEER), ended(1, 75, 9.1)]) == 75


def test_the_report_has_the_first_traceback_and_a_line_for_each_other_rank():
    exits = [
        ended(0, 1, 10.25, error=PEER),
        ended(1, 1, 10.0, error=BOOM),
        ended(2, -15, 10.5, signal_number=15),
        ended(3, -9, 15.5, signal_number=15, was_killed=True),
    ]
    assert failure_report(exits).splitlines() == [
        "rank 1 failed first, after 5.00 s: exit code 1",
        "  Traceback (most recent call last):",
        "    File 'train.py', line 3",
        "  ValueError: boom",
        "  log: logs/rank1.log",
        "rank 0, 250 ms later: exit code 1 - RuntimeError: Connection closed by peer; log: logs/rank0.log",
        "rank 2, 500 ms later: stopped by SIGTERM; log: logs/rank2.log",
        "rank 3, 5.50 s later: did not end on SIGTERM, so it was killed; log: logs/rank3.log",
    ]


def test_a_killed_rank_is_named_with_its_signal_and_its_last_output():
    report = failure_report([ended(0, -signal.SIGKILL, error="step 3\nstep 4")])
    assert report.startswith("rank 0 failed first, after 5.00 s: killed by SIGKILL (perhaps out of memory")
    assert "  its stderr ends with:\n  step 3\n  step 4\n" in report


@pytest.mark.parametrize(
    "error",
    [
        "AssertionError: Torch not compiled with CUDA enabled",
        "AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'",
        "RuntimeError: No CUDA GPUs are available",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that ...",
    ],
)
def test_a_script_for_cuda_is_shown_the_cpu_mode(error):
    """Nothing told of it where a script for CUDA was started without."""
    report = failure_report([ended(0, 1, error=traceback_of("train.py", error=error))])
    assert f"  {error}\n  It asks for CUDA, which is not here." in report
    assert "shardwright run --device cpu" in report
    assert "CPU mode" not in failure_report([ended(0, 1, error=BOOM)])


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            "AttributeError: 'list' object has no attribute 'reduce_mean'",
            "(loss.item()) becomes a list",
        ),
        ("AttributeError: 'Net' object has no attribute 'backward'", "Hand that to the step function."),
        ("ValueError: trying to initialize the default process group twice!", "before sw.init()."),
        ("bdb.BdbQuit", "breakpoint() and input() need a terminal"),
        ("EOFError: EOF when reading a line", "breakpoint() and input() need a terminal"),
    ],
)
def test_errors_of_others_come_with_what_to_do(error, remedy):
    assert remedy in failure_report([ended(0, 1, error=traceback_of("train.py", error=error))])
    assert remedy not in failure_report([ended(0, 1, error=BOOM)])


def test_the_exit_log_keeps_lives_apart(tmp_path):
    log = ExitLog(tmp_path / "exits")
    assert (log.read(), log.of_last_life(), log.next_life(0)) == ([], [], 0)
    first, second = ended(0, 1, error=BOOM), ended(0, 0, life=1)
    log.append(first)
    assert (log.next_life(0), log.next_life(1)) == (1, 0)
    log.append(second)
    assert log.read() == [first, second]
    assert log.of_life(0) == [first]
    assert log.of_last_life() == [second]


def test_what_a_run_came_to_is_no_last_word_nor_is_code_that_starts_a_script():
    """Its times differ, so that no failure was the same as the one before."""
    error = 'Traceback (most recent call last):\n  File "train.py", line 4, in <module>\nValueError: boom'
    begin, _, rest = error.partition("\n")
    started = f'{begin}\n  File "<string>", line 1, in <module>\n    exec(*main())\n{rest}'
    slow = "  rank 1 kept the others waiting in 3 of 9 steps: 1.20 s, 40% of their time"
    spent = str(Spent(productive_s=90.0, starts_s=6.0, lost_s=4.0, lost_steps=3, restarts=1))
    step = "step 6 | loss 0.1 | 5 samples/s"
    end = f"{step}\nfailed: 6 steps, loss 0.1\n{slow}\n  {spent}\n  report r\n"
    for words in (error, started):
        assert last_words(f"{words}\n{end}") == error


def test_the_last_words_are_the_last_traceback_with_its_chain():
    handled = "Traceback (most recent call last):\n  File 'a'\nKeyError: 'handled long ago'\nstep 7\n"
    chained = (
        "Traceback (most recent call last):\n  File 'b'\nKeyError: 1\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  File 'c'\nValueError: 2"
    )
    assert last_words(handled + chained + "\n") == chained


def test_many_ranks_that_ended_alike_share_a_line():
    stopped = [ended(rank, -15, 10.5 + rank / 100, signal_number=15) for rank in (7, 1, 3, 5)]
    text = failure_report([ended(0, 1, error=BOOM), *stopped, ended(2, 1, 10.2, error=PEER)])
    assert text.splitlines()[-2:] == [
        "rank 2, 200 ms later: exit code 1 - RuntimeError: Connection closed by peer; log: logs/rank2.log",
        "4 ranks (1, 3, 5, 7), the first of them 510 ms later: stopped by SIGTERM; "
        "logs beside that of rank 0",
    ]


def test_a_gradient_of_another_rank_is_explained():
    """Only Python's "'NoneType' object has no attribute 'norm'" was said."""
    words = traceback_of("train.py", error="AttributeError: 'NoneType' object has no attribute 'norm'")
    remedy = "A rank has the gradients of its own parameters; grad of the others is None."
    assert remedy not in failure_report([ended(0, 1, error=words)])
    assert remedy in failure_report([ended(0, 1, error=words.replace("call()", "p.grad.norm()"))])
    error = "TypeError: unsupported operand type(s) for *: 'float' and 'NoneType'"
    words = traceback_of("train.py", error=error).replace("^^^^^^", "~~~~^~~~~~~~")
    assert remedy not in failure_report([ended(0, 1, error=words)])
    assert remedy in failure_report([ended(0, 1, error=words.replace("call()", "0.1 * p.grad"))])


def traceback_of(*files, error="ValueError: boom"):
    """A traceback through these files."""
    frames = [f'  File "{file}", line 3, in f\n    call()\n    ^^^^^^' for file in files]
    return "\n".join(["Traceback (most recent call last):", *frames, error])


def test_calls_inside_shardwright_are_one_line_of_the_report():
    package = str(Path(shardwright.__file__).parent)
    ours = [f"{package}/torch/{name}.py" for name in ("step", "model", "engine")]
    text = traceback_of("train.py", *ours, "model.py", *ours)
    assert fold(text, to_the_end=True).splitlines() == [
        "Traceback (most recent call last):",
        '  File "train.py", line 3, in f',
        "    call()",
        "    ^^^^^^",
        "  [3 calls inside shardwright]",
        '  File "model.py", line 3, in f',
        "    call()",
        "    ^^^^^^",
        "  [3 calls inside shardwright]",
        "ValueError: boom",
    ]
    # Where the error is none of Shardwright's, it may be a mistake of ours: the last frames tell.
    assert fold(text, to_the_end=False).count("call()") == 5
    assert fold(traceback_of("train.py", *ours[:2]), to_the_end=True).count("call()") == 3
    chained = f"{text}\n\nDuring handling of the above exception, another exception occurred:\n\n{text}"
    assert fold(chained, to_the_end=True).count("[3 calls inside shardwright]") == 4


def test_causes_inside_shardwright_are_left_out_where_the_error_is_for_users():
    """A replica without data was told in four tracebacks, three of them of sockets."""
    linked = "\n\nThe above exception was the direct cause of the following exception:\n\n"
    ours = f"{Path(shardwright.__file__).parent}/comm/one_host/local_link.py"
    inside = traceback_of(ours, contextlib.__file__, error="ConnectionResetError: gone")
    error = traceback_of("train.py", error="shardwright.errors.PeerLostError: rank 1 ran out of data")
    assert fold(f"{inside}{linked}{error}", to_the_end=True) == error
    assert "ConnectionResetError: gone" in fold(f"{inside}{linked}{error}", to_the_end=False)
    by_the_user = traceback_of(ours, "model.py", error="KeyError: 'mask'")
    assert "KeyError" in fold(f"{by_the_user}{linked}{error}", to_the_end=True)


def test_a_rank_that_was_stopped_while_it_ended_on_its_own_error_is_the_cause():
    """Python takes a while to end; the rank that lost it was quicker, and told to be first."""
    error = traceback_of("train.py", error="shardwright.errors.TraceError: it reads a value")
    exits = [ended(0, 1, 10.0, error=PEER), ended(1, -15, 10.1, signal_number=15, error=error)]
    assert [worker_exit.rank for worker_exit in first_cause_first(exits)] == [1, 0]
    assert exit_code(exits) == 2
    assert failure_report(exits).startswith(
        "rank 1 failed first, after 5.10 s: an error of its own (it was about"
    )
    interrupted = ended(
        1, 1, 10.1, signal_number=2, error=traceback_of("train.py", error="KeyboardInterrupt")
    )
    assert [worker_exit.rank for worker_exit in first_cause_first([exits[0], interrupted])] == [0, 1]


def test_a_lost_peer_without_a_name_is_looked_for_where_ranks_are():
    lost = ended(0, 1, 10.0, error=PEER)
    other = ended(1, -15, 10.5, signal_number=15)
    assert "in the reports of the other hosts" in failure_report([lost, other])
    here = [replace(each, world_size=2) for each in (lost, other)]
    assert "in the logs of the others" in failure_report(here)


def test_a_rank_that_waited_for_one_that_was_done():
    """It was sent to the reports of other hosts."""
    report = failure_report([ended(0, 1, 10.5, error=PEER), ended(1, 0, 10.0)])
    assert report.startswith("rank 1 ended early, with exit code 0: rank 0 needed it, and ended after 5.50 s")
    assert "rank 1 ended with exit code 0 before. All ranks must run the same steps" in report
    assert "other hosts" not in report


def test_a_rank_that_hangs_is_in_the_headline_and_not_the_one_that_waited():
    error = traceback_of(
        "train.py",
        error="shardwright.errors.PeerTimeoutError: receiving from rank 1 failed: no answer within 300 s. It "
        "hangs, or is at another place of the script; its log may tell.",
    )
    exits = [ended(0, 1, error=error), ended(1, -15, 10.5, signal_number=15)]
    headline, *_ = failure_report(exits).splitlines()
    assert headline == "rank 1 hangs: rank 0 waited for it in vain, and ended after 5.00 s: exit code 1"
    assert exit_code(exits) == 6


def test_a_rank_that_another_has_ended_is_what_hangs_and_no_cause():
    """Its end, by a signal that leaves no trace, comes before that of the rank that gave up."""
    error = traceback_of(
        "train.py",
        error="shardwright.errors.PeerTimeoutError: rank 1 hangs: a signal (SIGSTOP) has stopped its process "
        "7 for 4 s, and rank 0 waits for it. It was in step 3, at train.py:8.",
    )
    exits = [ended(1, -9, 10.0), ended(0, 6, 10.01, error=error)]
    report = failure_report(exits)
    assert report.startswith("rank 1 hangs: rank 0 waited for it in vain, and ended after")
    assert "killed, because rank 0 found that it hangs" in report
    assert "out of memory" not in report
    assert "other hosts" not in report
    assert exit_code(exits) == 6


def again(*lives):
    return why_not_again(
        *([replace(exit_, life=life) for exit_ in exits] for life, exits in enumerate(lives))
    )


def test_what_would_fail_again_is_not_started_again():
    usage = traceback_of("train.py", error="shardwright.errors.ConfigError: partitions is 0")
    assert again([], [ended(0, 1, error=usage)]) == "a ConfigError comes again at every start"
    own = traceback_of("train.py", error="ValueError: no such column")
    first = replace(ended(1, 1, error=own), steps=41)
    assert again([], [first]) == ""
    assert again([first], [first]) == "rank 1 has failed in the same way after step 41 twice"
    frames = traceback_of("train.py", "own.py", error="ValueError: no such column")
    forked = replace(first, error=f"a warning\n{frames}")
    assert again([first], [forked]) == "rank 1 has failed in the same way after step 41 twice"
    # The launcher's signal met it as it ended: it still ended on its own error.
    met = replace(first, exit_code=-15, signal_number=15)
    assert again([met], [first]) == again([first], [met]) == again([first], [first])
    assert again([first], [replace(met, error="")]) == ""
    other = replace(first, error=traceback_of("train.py", error="ValueError: no such row"))
    assert again([first], [other]) == again([first], [replace(first, steps=42)]) == ""
    assert again([replace(first, steps=None)], [replace(first, steps=None)]) == ""


def test_ranks_that_saved_for_another_host_start_again():
    """With --min-nodes hosts may come and go before a step is made."""
    saved = replace(ended(0, 75), steps=41)
    assert again([saved], [saved]) == ""


@pytest.mark.parametrize("kind", ["CheckpointError", "TraceMismatchError", "PeerTimeoutError"])
def test_what_may_be_another_s_doing_or_pass_is_started_again(kind):
    error = traceback_of("train.py", error=f"shardwright.errors.{kind}: Stale file handle")
    assert again([], [replace(ended(0, 1, error=error), steps=7)]) == ""


def test_a_usage_error_behind_the_first_step_may_be_of_other_ranks():
    error = traceback_of("train.py", error="shardwright.errors.UsageError: rank 1 is elsewhere")
    assert again([], [replace(ended(0, 1, error=error), steps=7)]) == ""
    assert again([], [ended(0, 1, error=error)]) == "a UsageError comes again at every start"


def test_a_rank_that_noticed_an_end_before_is_no_cause():
    hangs = traceback_of(
        "train.py",
        error="shardwright.errors.PeerTimeoutError: rank 1 hangs: a signal (SIGSTOP) has stopped its process "
        "7 for 4 s, and rank 0 waits. It was in step 3, at train.py:8.",
    )
    noticed = traceback_of("train.py", error="shardwright.errors.PeerLostError: receiving from rank 1 failed")
    exits = [ended(1, -9, 10.0), ended(2, 1, 10.01, error=noticed), ended(0, 6, 12.0, error=hangs)]
    assert failure_report(exits).startswith("rank 1 hangs: rank 0 waited for it in vain")
    assert exit_code(exits) == 6


def test_a_host_that_cannot_be_reached_does_not_hang():
    error = traceback_of(
        "train.py",
        error="shardwright.errors.PeerTimeoutError: host a cannot reach host b (10.0.0.2), on which rank 1 "
        "runs (timed out): receiving from rank 1 failed: no answer within 300 s.",
    )
    assert failure_report([ended(0, 1, error=error)]).startswith("rank 0 failed first")


def test_a_rank_that_was_killed_is_started_again_unless_it_is_at_the_same_step():
    killed = ended(1, -9, error="its last words")
    assert again([killed], [killed]) == ""
    at_step = replace(killed, steps=7)
    assert again([at_step], [at_step]) == "rank 1 has failed in the same way after step 7 twice"


def test_ranks_that_lost_a_peer_or_were_stopped_are_started_again():
    lost = replace(ended(0, 1, error=PEER), steps=7)
    assert again([lost], [lost]) == ""
    stopped = replace(ended(0, -15, signal_number=15), steps=7)
    assert again([stopped], [stopped]) == ""


def late(rank, waited_for, at_s=10.0):
    """A rank that has waited in vain, by what it says of whom."""
    error = traceback_of("train.py", error=f"shardwright.errors.PeerTimeoutError: {waited_for}")
    return ended(rank, 1, at_s, error=error)


@pytest.mark.parametrize(
    "said",
    [
        "all_reduce SUM of 9 float32 (number 99 of this group): rank 2 did not come within 10 s. It hangs",
        "Rank 2 has not come within 10 s",
        "waiting for a value of rank 2 failed: no answer within 10 s",
    ],
)
def test_a_rank_that_hangs_is_found_in_all_that_ranks_say(said):
    exits = [late(0, said), ended(2, -15, 10.1, signal_number=15)]
    assert failure_report(exits).startswith("rank 2 hangs: rank 0 waited for it in vain")


def test_a_rank_that_hangs_is_found_behind_those_that_waited_for_it():
    """Rank 1, which waited itself, was in the headline."""
    waited = "receiving from rank {} failed: no answer within 10 s."
    stuck = ended(2, -9, 15.0, signal_number=15, was_killed=True)
    exits = [late(0, waited.format(1)), late(1, waited.format(2), 10.1), stuck]
    report = failure_report(exits)
    assert report.startswith("rank 2 hangs: rank 0 waited for it in vain")
    assert "rank 2, 5.00 s later: killed, because rank 0 found that it hangs" in report
    noticed = traceback_of("train.py", error="shardwright.errors.PeerLostError: rank 0 is lost: it has ended")
    exits = [late(0, waited.format(1)), ended(1, 1, 10.1, error=noticed), stuck]
    assert failure_report(exits).startswith("rank 2 hangs: rank 0 waited for it in vain")


def test_a_rank_of_this_host_is_not_taken_for_one_that_hangs_elsewhere():
    timed_out = traceback_of("train.py", error="RuntimeError: Timed out waiting 10000ms for recv operation")
    told = ended(1, -15, 10.1, signal_number=15)
    here = [ended(0, 1, error=timed_out, world_size=2), told]
    assert failure_report(here).startswith("rank 1 hangs: rank 0 waited for it in vain")
    of_four = [ended(0, 1, error=timed_out, world_size=4), told]
    assert failure_report(of_four).startswith("rank 0 failed first,")


def test_a_rank_that_is_alone_in_a_collective_is_in_the_headline():
    lone = late(
        1, "rank 1 waits in torch.distributed.all_reduce. All ranks of a group make the same collectives"
    )
    told = ended(2, -15, 10.1, signal_number=15)
    assert failure_report([lone, told]).startswith("rank 1 failed first,")
