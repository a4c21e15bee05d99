"""The launchers of the hosts meet at a store that strangers reach: what they write there is refused.

Where several hosts meet: a name that nobody knows is refused, and a wait is told.
"""

import pickle
import socket
import threading
from datetime import timedelta

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

from shardwright.comm.joining.run_secret import SECRET, ForgedError, new_secret
from shardwright.comm.joining.store import loopback_tcp_store
from shardwright.errors import LaunchError
from shardwright.launch.ranks import meeting_place
from shardwright.launch.ranks.agent import _not_started
from shardwright.launch.ranks.meeting_place import (
    check_endpoint,
    is_own,
    wait_until_answered,
)
from shardwright.launch.ranks.rendezvous import BACKEND, _StatesAsJson
from shardwright.launch.ranks.request import LaunchRequest

TIMEOUT = timedelta(seconds=5)


def handler(*, hosts, endpoint="", **options):
    parameters = RendezvousParameters(
        BACKEND, endpoint, "run", hosts, hosts, local_addr="127.0.0.1", **options
    )
    return rendezvous_handler_registry.create_handler(parameters)


def test_what_stood_in_an_earlier_round_is_refused_in_the_next(monkeypatch):
    """The code knew nothing of the prefix of a round: an old value could be put back."""
    monkeypatch.setenv(SECRET, new_secret())
    one_host = handler(hosts=1)
    first, second = one_host.next_rendezvous(), one_host.next_rendezvous()
    first.store.set("key", "of the first round")
    stranger = TCPStore("127.0.0.1", first.bootstrap_store_info.master_port, is_master=False, timeout=TIMEOUT)
    stranger.set("run/2/key", stranger.get("run/1/key"))
    with pytest.raises(ForgedError, match="'run/2/key'"):
        second.store.get("key")


def test_hosts_without_numbers_tell_under_a_code_where_the_ranks_meet(monkeypatch):
    """The address of the ranks' store stood there without one."""
    monkeypatch.setenv(SECRET, new_secret())
    server = loopback_tcp_store(timeout_s=20)
    handlers = [handler(hosts=2, endpoint=f"127.0.0.1:{server.port}", is_host="0") for _ in range(2)]
    threads = [threading.Thread(target=each.next_rendezvous) for each in handlers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    stranger = TCPStore("127.0.0.1", server.port, is_master=False, timeout=TIMEOUT)
    (key,) = [name.removeprefix("/") for name in stranger.list_keys() if name.endswith("MASTER_ADDR")]
    address = stranger.get(key)
    assert address[32:] == b"127.0.0.1"
    stranger.set(key, "10.66.66.66")
    found = handlers[0]._store
    with pytest.raises(ForgedError, match="MASTER_ADDR"):
        found.get(key)
    for each in handlers:
        each.shutdown()


def test_hosts_with_numbers_wait_for_one_another_where_signals_end_it():
    """PyTorch waits for them in C++, and Ctrl-C was answered after ten minutes."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
    found, numbers = [], [threading.Event(), threading.Event()]

    def host(number):
        each = handler(hosts=2, endpoint=endpoint, rank=number)
        numbers[number].set()
        found.append((number, each.next_rendezvous()))

    threads = [threading.Thread(target=host, args=(number,), daemon=True) for number in (1, 0)]
    threads[0].start()
    numbers[1].wait(20)
    threads[0].join(0.3)
    assert not found
    threads[1].start()
    for thread in threads:
        thread.join(20)
    assert sorted((number, info.rank, info.world_size) for number, info in found) == [(0, 0, 2), (1, 1, 2)]


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"3", b"[]", b"{}", b'{"round": Infinity}', b"[" * 100_000, pickle.dumps({})]
)
def test_a_state_that_no_launcher_wrote(text):
    states = _StatesAsJson()
    with pytest.raises(states.PickleError, match="the state of the rendezvous is none"):
        states.loads(text)


def test_why_ranks_could_not_be_started_is_the_first_cause(tmp_path):
    """It was: "The rendezvous state is corrupt. See inner exception for details"."""
    (tmp_path / "train.py").touch()
    request = LaunchRequest(target=str(tmp_path / "train.py"), run_folder=tmp_path)
    cause = ForgedError("'the/key' has no code.\nException raised from c10d")
    error = RuntimeError("See inner exception for details.")
    error.__cause__ = cause
    assert _not_started(request, error) == (
        "1 ranks on this host could not be started: ForgedError: 'the/key' has no code. "
        "shardwright run -v shows what torchelastic did."
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
