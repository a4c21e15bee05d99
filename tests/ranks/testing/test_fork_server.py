"""The fork server: nothing is left running, no store is shared, a call is short."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from choices import some_combinations
from shardwright.errors import LaunchError
from shardwright.launch.processes import children
from shardwright.testing import run_ranks, run_ranks_outcomes
from shardwright.testing.client import this_process_client

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks into /proc")


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], *, limit_s: float = 10.0) -> list[int]:
    limit = time.monotonic() + limit_s
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < limit:
        time.sleep(0.02)
    return left


def server_pid() -> int:
    run_ranks(lambda: None, 1)
    pid = this_process_client().server_pid
    assert pid is not None
    return pid


def test_the_server_never_has_a_thread():
    pid = server_pid()
    run_ranks(dist.barrier, 4)
    assert len(list((Path("/proc") / str(pid) / "task").iterdir())) == 1


def test_ranks_have_other_hash_seeds():
    """All ranks were forked from one server, so that sets of names had the same order on all of them: models
    that registered their parts in the order of a set trained wrongly wherever a launcher started the ranks.
    """

    def seeds():
        return hash("audio"), hash("video")

    found = run_ranks(seeds, 4)
    assert found[0] == found[3] != found[1] == found[2]
    assert run_ranks(seeds, 4) == found


def test_one_server_and_one_store_serve_all_jobs():
    pid = server_pid()
    before = children(pid)
    assert len(before) == 2  # the store and the nursery
    for _ in range(10):
        run_ranks(dist.barrier, 2)
    assert this_process_client().server_pid == pid
    assert children(pid) == before


def test_many_jobs_leak_no_descriptor_and_no_port():
    def script():
        dist.init_process_group("gloo")
        dist.barrier()
        return int(os.environ["MASTER_PORT"])

    pid = server_pid()
    run_ranks(script, 2, init_process_group=False)
    num_before = len(list((Path("/proc") / str(pid) / "fd").iterdir()))
    ports = {run_ranks(script, 2, init_process_group=False)[0] for _ in range(12)}
    assert len(list((Path("/proc") / str(pid) / "fd").iterdir())) == num_before
    run_ranks(script, 2, init_process_group=False)
    still_open = [port for port in ports if _accepts(port)]
    assert len(still_open) <= 1  # the present store may have got the number of an older one


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_job_never_sees_the_keys_of_another():
    def leave_a_key():
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
        found = store.check(["key"])
        store.set("key", "value")
        return found

    for _ in range(3):
        assert run_ranks(leave_a_key, 1) == [False]


@pytest.mark.parametrize(
    ("how", "own_session"),
    some_combinations(["returns", "raises", "is killed", "hangs"], [False, True]),
)
def test_children_of_ranks_do_not_outlive_the_job(how, own_session, tmp_path):
    def start_a_child():
        child = subprocess.Popen(["sleep", "1000"], start_new_session=own_session)
        (tmp_path / str(dist.get_rank())).write_text(str(child.pid))
        if how == "raises":
            raise ValueError("boom")
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs":
            time.sleep(1000)
        child.returncode = 0  # or Popen would warn that it still runs

    run_ranks_outcomes(start_a_child, 2, timeout_s=1.0)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not [pid for pid in pids if alive(pid)]


CALLER = """
    import os, signal, subprocess, sys, time
    import torch.distributed as dist
    from shardwright.testing import run_ranks

    def job():
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print_to_caller = os.open(sys.argv_of_caller, os.O_WRONLY | os.O_APPEND)
        os.write(print_to_caller, f"{os.getpid()} {os.getppid()} {child.pid}\\n".encode())
        time.sleep(1000)

    def main(path):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the shell of a background job ignores it

        def named():
            sys.argv_of_caller = path
            job()
        run_ranks(named, 2, timeout_s=1000)

    main(sys.argv[1])
"""


@pytest.mark.thorough
def test_nothing_outlives_a_caller_that_is_killed(tmp_path):
    pids_file = tmp_path / "pids"
    pids_file.touch()
    caller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CALLER), str(pids_file)],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    limit_s = time.monotonic() + 60
    while len(pids_file.read_text().splitlines()) < 2 and time.monotonic() < limit_s:
        time.sleep(0.05)
    pids = [int(word) for word in pids_file.read_text().split()]
    assert len(pids) == 6
    server = pids[1]
    pids += children(server)
    caller.send_signal(signal.SIGKILL)
    caller.wait(timeout=30)
    assert wait_until_gone(pids) == []
    assert list(tmp_path.glob("shardwright-*")) == []


@pytest.mark.sweep
def test_ranks_die_with_a_server_that_is_killed_and_the_next_call_has_another():
    pid = server_pid()

    def kill_server():
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

    with pytest.raises(LaunchError, match="The fork server ended before it answered, with -9"):
        run_ranks(kill_server, 2)
    assert wait_until_gone([pid]) == []
    assert run_ranks(dist.get_rank, 2) == [0, 1]
    assert this_process_client().server_pid != pid
