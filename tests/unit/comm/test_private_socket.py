"""Unix sockets of one user: others cannot knock, and whoever says nothing keeps nobody waiting.

Which interface gloo takes: the one that leads to rank 0, and not the one of the host's name.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardwright.comm.joining import interface
from shardwright.comm.joining.interface import take_interface_towards
from shardwright.comm.joining.session import PrivateListener, call
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


ADDRESSES = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.9.0.5"}


@pytest.fixture
def routes(monkeypatch):
    """From which address each host is reached; another host: by the default route."""
    found = {"head": "10.9.0.5", interface._ELSEWHERE: "10.0.0.5"}
    monkeypatch.setattr(interface, "_addresses", lambda: ADDRESSES)
    monkeypatch.setattr(interface, "own_address_towards", found.get)
    return found


def taken(host, **environ):
    take_interface_towards(host, environ)
    return environ.get("GLOO_SOCKET_IFNAME")


def test_the_interface_of_the_route(routes):
    assert taken("head") == "ib0"


def test_a_name_that_leads_to_loopback_is_this_host(routes):
    """As Debian names a host in its own /etc/hosts: rank 0 waited there, where nobody else comes."""
    routes["head"] = "127.0.1.1"
    assert taken("head") == "eth0"


def test_without_a_route_the_first_that_leads_out(routes):
    routes.clear()
    assert taken("head") == "eth0"


def test_hosts_that_meet_on_loopback_are_one(routes):
    assert taken("127.0.0.1") in ("lo", "lo0")
    assert taken("localhost") in ("lo", "lo0")


def test_what_is_named_stays(routes):
    assert taken("head", GLOO_SOCKET_IFNAME="eth7") == "eth7"


def test_a_machine_with_loopback_alone_is_left_to_gloo(monkeypatch):
    monkeypatch.setattr(interface, "_addresses", lambda: {"lo": "127.0.0.1"})
    monkeypatch.setattr(interface, "own_address_towards", lambda host: None)
    assert taken("head") is None


def test_this_machine_s_own_interfaces_have_addresses():
    assert set(interface._addresses().values()) >= {"127.0.0.1"}
    assert interface.own_address_towards("127.0.0.1") == "127.0.0.1"
    assert interface.own_address_towards("no.such.name.invalid") is None
