"""Hosts of one machine: their links have the rates that were asked for, and nothing is left of them."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwright.errors import LaunchError, UsageError
from shardwright.launch.hosts_network import HostsNetwork
from shardwright.testing.cluster import Cluster, missing_for_networks

_MISSING = missing_for_networks()
needs_networks = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))

SEND = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, data = dist.get_rank(), torch.ones(1_000_000)
dist.barrier()
start = time.perf_counter()
if rank == 0:
    dist.send(data, dist.get_world_size() - 1)
elif rank == dist.get_world_size() - 1:
    dist.recv(data, 0)
    print("seconds", time.perf_counter() - start)
dist.barrier()
dist.destroy_process_group()
"""


def left_of(namespaces):
    return [name for name in namespaces if Path("/run/netns", name).exists()]


@needs_networks
def test_messages_between_hosts_go_over_their_links_at_the_rate_of_these(tmp_path):
    script = tmp_path / "send.py"
    script.write_text(SEND)
    with Cluster(hosts=2, ranks_per_host=2, rate_bit_per_s=100e6) as machines:
        before = machines.traffic()
        outputs = machines.torchrun([str(script)], timeout_s=60)
        sent = (machines.traffic()[0] - before[0]).sent_bytes
    seconds = float(outputs[1].split("seconds")[1].split()[0])
    assert 4e6 < sent < 4.5e6  # 4 MB of tensor, and what the ranks say to find one another
    assert seconds * 1.1 > 4e6 * 8 / 100e6
    assert not left_of(machines.network.namespaces)


@needs_networks
def test_what_still_runs_is_ended():
    with Cluster(hosts=2) as machines:
        sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
        outcomes = machines.run([sleep, [sys.executable, "-c", "raise SystemExit(3)"]], timeout_s=1.0)
        assert [outcome.exit_code for outcome in outcomes] == [None, 3]
        with pytest.raises(LaunchError, match=r"host \d ended with exit code 1"):
            machines.torchrun(["no_such_script.py"], timeout_s=60)
    assert not left_of(machines.network.namespaces)


@needs_networks
def test_nothing_is_left_when_the_process_is_killed():
    code = (
        "import os, signal\n"
        "from shardwright.launch.hosts_network import HostsNetwork\n"
        "network = HostsNetwork(2).__enter__()\n"
        "print(*network.namespaces, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], timeout=30, stdout=subprocess.PIPE, text=True).stdout
    made = said.split()
    assert len(made) == 3
    deadline_s = time.monotonic() + 10
    while left_of(made) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not left_of(made)


def test_a_machine_that_lacks_something_says_so(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda tool, path=None: f"/sbin/{tool}")
    with pytest.raises(UsageError, match="cannot have a network of hosts: it takes root"):
        HostsNetwork(2)
    with pytest.raises(UsageError, match="1 to 200 hosts, not 0"):
        HostsNetwork(0)
