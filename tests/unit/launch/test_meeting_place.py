"""Where several hosts meet: a name that nobody knows is refused, and a wait is told."""

import socket

import pytest

from shardwright.errors import LaunchError
from shardwright.launch.ranks import meeting_place
from shardwright.launch.ranks.meeting_place import (
    check_endpoint,
    is_own,
    wait_until_answered,
)


class Names:
    """A resolver that knows a name after some questions, and the clock beside it."""

    def __init__(self, known_after=None):
        self.left, self.now_s, self.said = known_after, 0.0, []

    def resolve(self, name):
        assert name == "first-host"
        if self.left is None:
            raise socket.gaierror(-2, "Name or service not known")
        if self.left:
            self.left -= 1
            raise socket.gaierror(-3, "Temporary failure in name resolution")

    def sleep(self, seconds):
        self.now_s += seconds

    def check(self, **environ):
        check_endpoint(
            "first-host:29400",
            environ,
            say=self.said.append,
            resolve=self.resolve,
            clock=lambda: self.now_s,
            sleep=self.sleep,
        )


def test_a_name_without_an_address_is_refused_within_seconds():
    """Ranks waited for a minute, and then for a store that could not be reached."""
    names = Names()
    with pytest.raises(
        LaunchError, match=r"first-host:29400: the host name first-host does not resolve here"
    ):
        names.check()
    assert names.now_s <= 3
    assert not names.said


def test_what_can_be_no_name_is_refused_as_well():
    """Python raises another error for it, and its traceback was shown."""
    names = Names()
    with pytest.raises(LaunchError, match=r"the host name a\.\.b does not resolve here \(.*label"):
        check_endpoint("a..b:29400", {}, say=print, clock=lambda: names.now_s, sleep=names.sleep)


def test_the_name_of_a_pod_may_come_later():
    names = Names(known_after=40)
    names.check(KUBERNETES_SERVICE_HOST="10.0.0.1")
    assert names.said == [
        "waiting for the name first-host, which does not resolve yet; at most 300 s",
    ]
    with pytest.raises(LaunchError):
        Names().check(KUBERNETES_SERVICE_HOST="10.0.0.1")


def test_a_store_is_waited_for_until_it_answers():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        wait_until_answered("127.0.0.1", port, limit_s=0)
    names = Names()
    with pytest.raises(TimeoutError, match=rf"nothing has answered at 127.0.0.1:{port} in 10 s \(.*refused"):
        wait_until_answered("127.0.0.1", port, limit_s=10, clock=lambda: names.now_s, sleep=names.sleep)


def test_an_address_of_this_host_is_known():
    assert is_own("localhost")
    assert not is_own("203.0.113.5")  # for documentation: no host has it
    assert not is_own("no-such-host.invalid")


def test_a_host_knows_its_name_behind_an_address_that_it_does_not_have(monkeypatch):
    """It waited for the store that it had to serve itself."""
    monkeypatch.setattr(meeting_place.socket, "gethostname", lambda: "203.0.113.5")
    assert is_own("203.0.113.5")
