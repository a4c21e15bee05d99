"""Hosts that are lost in mid-training: the ranks that are left end soon, and name those that are gone."""

import re
import threading
import time
from pathlib import Path
from socket import gethostname

import pytest

from shardwright.errors import LaunchError
from shardwright.testing.cluster import Cluster, missing_for_networks

_MISSING = missing_for_networks()
pytestmark = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))

SCRIPT = str(Path(__file__).with_name("training_until_lost.py"))
TIMEOUT_S = 4.0
# Of themselves ranks take the interface that leads to rank 0, whatever the name of the host resolves to.
UNSET = {"GLOO_SOCKET_IFNAME": ""}
# For what is under way, the notes of the others, and a machine that is busy.
GRACE_S = 6.0


def lost(folder, degree, lose, **env):
    """What each rank says, and after how many seconds, when something happens to host 1 in mid-training."""
    happened_s = []

    def watch(machines):
        while len(list(folder.glob("trains*"))) < 4 and not ended.wait(0.01):
            pass
        if not ended.is_set():
            happened_s.append(time.time())
            lose(machines.network)

    ended = threading.Event()
    with Cluster(hosts=2, ranks_per_host=2) as machines:
        watcher = threading.Thread(target=watch, args=(machines,))
        watcher.start()
        try:
            with pytest.raises(LaunchError) as caught:
                machines.torchrun(
                    [SCRIPT, str(folder), str(degree), str(TIMEOUT_S)], timeout_s=90, env=UNSET | env
                )
        finally:
            ended.set()
            watcher.join()
    assert happened_s, str(caught.value)
    told = {}
    for rank in range(4):
        file = folder / f"error{rank}"
        if file.exists():
            at_s, _, text = file.read_text().partition("\n")
            told[rank] = float(at_s) - happened_s[0], text
    return told


def check(text, others):
    """Whether the last error of a traceback is ours and names one of some ranks."""
    error = text[text.rindex("shardwright.errors.") :]
    assert error.startswith(("shardwright.errors.PeerLostError", "shardwright.errors.PeerTimeoutError"))
    named = {int(rank) for ranks in re.findall(r"ranks? (\d[\d, ]*)", error) for rank in ranks.split(",")}
    assert named & set(others) or "cannot reach host" in error


def test_a_link_that_dies_in_mid_step(tmp_path):
    """The host without the store waited for it for ever; with degree 2, ranks of the own host were named."""
    chaos = tmp_path / "chaos.yaml"
    chaos.write_text("faults: [{kind: link_down, rank: 2, step: 4}]")  # rank 2 is on host 1
    told = lost(tmp_path, 4, lambda _: None, SHARDWRIGHT_CHAOS=str(chaos))
    assert sorted(told) == [0, 1, 2, 3]
    for rank, (seconds, text) in told.items():
        assert seconds < TIMEOUT_S + GRACE_S
        check(text, (2, 3) if rank < 2 else (0, 1))
        address = "10.77.0.2" if rank < 2 else "10.77.0.1"
        assert f"cannot reach host {gethostname()} ({address})" in text


def test_a_host_that_is_killed(tmp_path):
    told = lost(tmp_path, 2, lambda network: network.end_all(1))
    assert {0, 1} <= told.keys()
    for rank in (0, 1):
        seconds, text = told[rank]
        assert seconds < GRACE_S
        check(text, (2, 3))
