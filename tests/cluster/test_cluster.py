"""Hosts of one machine: their links have the rates that were asked for, and nothing is left of them.

A host that computes more slowly than others gets less of the model.

Strangers who reach a run, from another host or as another user of this one: nothing of theirs is run.

A process of another user, in another network namespace, had its command run by both ranks: the store listened
everywhere, and what stood in it was unpickled.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from shardwright.comm.joining.run_secret import SECRET, new_secret
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


SCRIPT = str(Path(__file__).with_name("planning_on_a_slow_host.py"))


@pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))
def test_a_slow_host_gets_less_of_the_model(tmp_path):
    out = tmp_path / "found.json"
    with Cluster(hosts=2, ranks_per_host=1, own_cores=True) as machines:
        machines.torchrun([SCRIPT, str(out)], timeout_s=120)
    found = json.loads(out.read_text())
    fast, slow = found["slowness"]
    assert slow > 1.2 * fast
    assert found["units"][0] > found["units"][1]
    assert any("Pipeline rank 1 takes" in why for why in found["why"])


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to be another user")

HERE = Path(__file__).parent
NOBODY = 65534
LONGEST_S = 60.0
LOOPBACK = ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")


@pytest.fixture
def shared():
    """A folder for the run and the stranger, which the stranger may write into."""
    with tempfile.TemporaryDirectory(prefix="strangers-") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def stranger(folder, address, how, *user):
    return [sys.executable, str(HERE / "stranger.py"), str(folder), address, how, *user]


def launcher(folder, *options):
    words = [sys.executable, "-m", "shardwright", "run", *options, "--run-dir", str(folder / "runs")]
    return [*words, str(HERE / "meeting_strangers.py"), str(folder)]


def check(folder, outputs, seconds):
    """Nothing of the stranger's was run, and the run went on or ended soon, with a clear error."""
    said = "\n".join(outputs)
    assert not (folder / "executed").exists(), said
    assert seconds < LONGEST_S, said
    if said.count("trained [") == 2:
        return "trained"
    assert "Error: " in said, said
    assert any(word in said for word in ("stranger", "could not join", "store", "not come", "did not")), said
    return "ended"


@needs_networks
def test_a_third_host_that_reaches_the_store(shared):
    with Cluster(hosts=3) as machines:
        first = machines.network.address(0)
        options = ("-n", "1", "--nnodes", "2", "--rdzv-endpoint", f"{first}:29500", "--name", "one")
        commands = [launcher(shared, *options, "--node-rank", str(host)) for host in range(2)]
        begun_s = time.monotonic()
        outcomes = machines.run(
            [*commands, stranger(shared, first, "race")], timeout_s=LONGEST_S + 30, env={SECRET: new_secret()}
        )
        (shared / "done").touch()
    ended = [outcome for outcome in outcomes[:2] if outcome.exit_code is not None]
    assert len(ended) == 2, outcomes
    check(shared, [each.output for each in outcomes[:2]], time.monotonic() - begun_s)
    assert (shared / "ready").exists(), outcomes
    said = "\n".join(each.output for each in outcomes[:2])
    assert "the ranks have no secret" not in said


@needs_networks
def test_one_host_cannot_be_reached_from_another(shared):
    with Cluster(hosts=2) as machines:
        knock = (
            "import socket, sys, time, pathlib\n"
            "folder = pathlib.Path(sys.argv[1])\n"
            "while not (folder / 'port').exists(): time.sleep(0.01)\n"
            "time.sleep(0.5)\n"
            "try: socket.create_connection((sys.argv[2], int((folder / 'port').read_text())), 5)\n"
            "except OSError as error: print('refused', error)\n"
            "(folder / 'ready').touch()\n"
        )
        outside = [sys.executable, "-c", knock, str(shared), machines.network.address(0)]
        # As on a real host, where nobody has chosen the interface.
        inside = ["env", "-u", "GLOO_SOCKET_IFNAME", *launcher(shared, "-n", "2")]
        run, knocked = machines.run([inside, outside], timeout_s=LONGEST_S)
    assert check(shared, [run.output], run.seconds) == "trained"
    assert "refused" in knocked.output
    listening = (shared / "listening").read_text().split()
    assert listening
    assert [each for each in listening if not each.startswith(LOOPBACK)] == []


@needs_root
def test_another_user_of_this_host(shared):
    (folder := shared / "runs").mkdir()
    folder.chmod(0o700)
    words = stranger(shared, "127.0.0.1", "race", str(NOBODY))
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    begun_s = time.monotonic()
    with subprocess.Popen(words, **options) as other:
        try:
            run = subprocess.run(launcher(shared, "-n", "2"), timeout=LONGEST_S + 30, **options)
        finally:
            (shared / "done").touch()
        assert other.wait(30) == 0, other.communicate()[0]
    check(shared, [run.stdout], time.monotonic() - begun_s)
    assert int((shared / "changed").read_text()) > 0
