"""Strangers who reach a run, from another host or as another user of this one: nothing of theirs is run.

A process of another user, in another network namespace, had its command run by both ranks: the store listened
everywhere, and what stood in it was unpickled.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from shardwright.comm.joining.run_secret import SECRET, new_secret
from shardwright.testing.cluster import Cluster, missing_for_networks

_MISSING = missing_for_networks()
needs_networks = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))
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
@pytest.mark.parametrize(
    ("how", "has_secret"),
    [
        ("race", True),
        pytest.param("plant", False, marks=pytest.mark.sweep),
        pytest.param("plant", True, marks=pytest.mark.sweep),
        pytest.param("race", False, marks=pytest.mark.sweep),
    ],
)
def test_a_third_host_that_reaches_the_store(shared, how, has_secret):
    with Cluster(hosts=3) as machines:
        first = machines.network.address(0)
        options = ("-n", "1", "--nnodes", "2", "--rdzv-endpoint", f"{first}:29500", "--name", "one")
        commands = [launcher(shared, *options, "--node-rank", str(host)) for host in range(2)]
        env = {SECRET: new_secret()} if has_secret else {}
        begun_s = time.monotonic()
        outcomes = machines.run([*commands, stranger(shared, first, how)], timeout_s=LONGEST_S + 30, env=env)
        (shared / "done").touch()
    ended = [outcome for outcome in outcomes[:2] if outcome.exit_code is not None]
    assert len(ended) == 2, outcomes
    outcome = check(shared, [each.output for each in outcomes[:2]], time.monotonic() - begun_s)
    assert (shared / "ready").exists(), outcomes
    said = "\n".join(each.output for each in outcomes[:2])
    assert ("the ranks have no secret" in said) <= (not has_secret)
    if has_secret and how == "plant":
        # Ranks wrote over it, or found it.
        assert outcome == "trained" or "stranger" in said


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
@pytest.mark.parametrize("how", ["race", pytest.param("plant", marks=pytest.mark.sweep)])
def test_another_user_of_this_host(shared, how):
    (folder := shared / "runs").mkdir()
    folder.chmod(0o700)
    words = stranger(shared, "127.0.0.1", how, str(NOBODY))
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
