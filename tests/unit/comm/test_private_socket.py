"""Unix sockets of one user: others cannot knock, and whoever says nothing keeps nobody waiting."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardwright.comm.joining.session import PrivateListener, call, is_our_user
from shardwright.comm.local_peers import _take_calls

_NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to be another user")
CONNECT = """
import os, socket, sys
os.setgid({user}); os.setuid({user})
caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    caller.connect(sys.argv[1])
except OSError as error:
    print(type(error).__name__)
else:
    print("connected", caller.recv(10))
"""


def as_another_user(path):
    words = [sys.executable, "-I", "-c", CONNECT.format(user=_NOBODY), path]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=20).stdout.strip()


@pytest.fixture
def listener():
    made = PrivateListener(socket.SOCK_SEQPACKET)
    yield made
    made.close()
    assert not Path(made.path).parent.exists()


def test_processes_of_one_user_meet(listener):
    with call(listener.path, socket.SOCK_SEQPACKET, timeout_s=5) as caller:
        taken = listener.accept()
        assert taken is not None
        assert is_our_user(caller)
        taken.close()


@needs_root
def test_another_user_cannot_knock(listener):
    assert as_another_user(listener.path) == "PermissionError"


@needs_root
def test_another_user_who_gets_that_far_is_hung_up_on(listener):
    for path, mode in ((Path(listener.path).parent, 0o755), (Path(listener.path), 0o777)):
        path.chmod(mode)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(listener.accept()))
    thread.start()
    assert as_another_user(listener.path) in ("connected b''", "ConnectionResetError")
    thread.join(10)
    assert taken == [None]


def test_who_says_nothing_or_something_else_keeps_nobody_waiting(listener):
    """The first one to connect was listened to until the timeout, before all others."""
    kind = socket.SOCK_SEQPACKET
    strangers = [call(listener.path, kind, timeout_s=5) for _ in range(5)]
    strangers[0].send(b"nonsense")
    strangers[1].send(b"")
    strangers[2].close()
    peer = call(listener.path, kind, timeout_s=5)
    peer.send(b"theirs ours")
    begun_s = time.monotonic()
    taken = _take_calls(listener, {"theirs ours": 1}, timeout_s=30)
    assert time.monotonic() - begun_s < 10
    assert list(taken) == [1]
    taken[1].send(b"hello")
    assert peer.recv(10) == b"hello"
    for each in (*strangers, peer, *taken.values()):
        each.close()


def test_a_rank_that_does_not_call_ends_the_wait(listener):
    with pytest.raises(TimeoutError, match="1 ranks have not called"):
        _take_calls(listener, {"theirs ours": 1}, timeout_s=0.2)
