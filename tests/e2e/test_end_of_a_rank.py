"""A script that never says it is done ends well, also where gloo's threads are behind."""

import os
import subprocess
import sys
import textwrap

import pytest

# The threads of gloo only run when nobody else wants to, so they are still busy with the last result when the
# interpreter ends. Without care for that every fifth of these ranks aborted.
SCRIPT = """
    import os, socket, sys
    from pathlib import Path
    import torch, torch.distributed as dist
    from shardwright.comm.launchers import detect
    from shardwright.comm.joining.process_group import init_process_group

    def rank(number, port):
        world = {"RANK": number, "WORLD_SIZE": 2, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": 2}
        environ = {key: str(value) for key, value in {**world, "MASTER_PORT": port}.items()}
        init_process_group(detect({**environ, "MASTER_ADDR": "127.0.0.1"}), backend="gloo", timeout_s=60)
        globals()["group"] = group = dist.new_group([0, 1])  # as a model would, it stays to the end
        dist.all_reduce(torch.ones(100), group=group)
        for task in Path("/proc/self/task").iterdir():
            if "runloop" in (task / "comm").read_text():
                os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
        for _ in range(4):
            dist.all_reduce(torch.ones(100), group=group)

    def free_port():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    def start(work, *arguments):
        pid = os.fork()
        if pid == 0:
            work(*arguments)
            sys.exit(0)
        return pid

    def spin():
        while os.getppid() == parent:
            pass
        os._exit(0)

    parent = os.getpid()
    for _ in range(len(os.sched_getaffinity(0))):
        start(spin)
    codes = []
    for _ in range(int(sys.argv[1])):
        port = free_port()
        ranks = [start(rank, number, port) for number in (0, 1)]
        codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    print(codes, flush=True)
    os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs threads that can be held back")
def test_ranks_end_well_without_being_told():
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), "2"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert (found.stdout, found.stderr) == ("[0, 0, 0, 0]\n", "")
