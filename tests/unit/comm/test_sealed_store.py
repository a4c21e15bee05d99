"""Values of a store carry a code: what strangers write there, move there or put back is refused."""

import os
import pickle
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore, TCPStore

from shardwright.comm.codec import encode
from shardwright.comm.collectives.connect import tell_all_through
from shardwright.comm.joining.run_secret import (
    SECRET,
    SECRET_FILE,
    ForgedError,
    Seal,
    new_secret,
    packed,
    seal_of_run,
    unpacked,
)
from shardwright.comm.joining.session import begin_session
from shardwright.comm.joining.store import SealedStore, loopback_tcp_store
from shardwright.errors import LaunchError, UsageError

SEAL = Seal(b"a key of this run")


@pytest.fixture
def stores():
    raw = HashStore()
    raw.set_timeout(timedelta(seconds=5))
    return raw, SealedStore(raw, SEAL)


@given(st.text(), st.binary(), st.binary(min_size=1), st.integers(0, 200))
def test_only_what_was_sealed_opens(name, message, other, at):
    data = SEAL.sealed(name, message)
    assert SEAL.opened(name, data) == message
    changed = bytearray(data)
    changed[at % len(data)] ^= other[0] or 1
    for forged in (bytes(changed), data[:-1], data + other, other, message, b""):
        with pytest.raises(ForgedError):
            SEAL.opened(name, forged)
    for seal, place in ((SEAL, name + "x"), (Seal(b"another"), name), (SEAL.derived("life", other), name)):
        with pytest.raises(ForgedError):
            seal.opened(place, data)


def test_values_go_through_a_prefix_and_through_c_plus_plus(stores):
    raw, sealed = stores
    store = PrefixStore("a", sealed)
    store.set("k", b"\xff\x00")
    assert store.get("k") == b"\xff\x00"
    assert raw.get("a/k")[32:] == b"\xff\x00"
    assert store.check(["k"])
    store.wait(["k"], timedelta(seconds=1))
    assert (store.add("n", 2), store.add("n", 3)) == (2, 5)
    assert store.compare_set("c", "", "1") == b"1"
    assert store.compare_set("c", "1", "2") == b"2"
    assert store.compare_set("c", "1", "3") == b"2"
    assert store.delete_key("k")
    assert not store.check(["k"])
    assert sealed.num_keys() == raw.num_keys()


def test_a_copy_lives_as_long_as_its_original():
    """C++ keeps its part of the object alone: the copy's methods were gone with its Python part."""
    server = loopback_tcp_store()
    sealed = SealedStore(server, SEAL)
    copy = PrefixStore("p", sealed).clone()
    copy.set("k", "v")
    assert PrefixStore("p", sealed).get("k") == b"v"


@pytest.mark.parametrize("forged", [b"", b"v", b"\0" * 32, b"\0" * 40, pickle.dumps(3)])
def test_what_a_stranger_writes_names_the_key(stores, forged):
    raw, sealed = stores
    raw.set("the/key", forged)
    with pytest.raises(
        LaunchError, match=r"'the/key' has \d+ bytes without the code .* a stranger has written"
    ):
        sealed.get("the/key")
    with pytest.raises(LaunchError, match="'the/key'"):
        sealed.compare_set("the/key", "x", "y")


def test_a_value_of_another_key_or_another_life_is_refused(stores):
    raw, sealed = stores
    sealed.set("a", "value")
    raw.set("b", raw.get("a"))
    with pytest.raises(LaunchError, match="'b'"):
        sealed.get("b")
    SealedStore(raw, SEAL.derived("life", b"1")).set("c", "value")
    with pytest.raises(LaunchError, match="'c'"):
        SealedStore(raw, SEAL.derived("life", b"2")).get("c")


def test_a_counter_that_is_no_number():
    server = loopback_tcp_store(timeout_s=5)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    client.set("n", "garbage")
    with pytest.raises(LaunchError, match="the counter 'n' of the run's store cannot be used"):
        SealedStore(client, SEAL).add("n", 1)
    assert server.add("m", 1) == 1  # the server goes on


def in_threads(begin, num_ranks):
    found = [None] * num_ranks

    def run(rank):
        try:
            found[rank] = begin(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def sessions(environs, *, one_host=False, store=None):
    server = loopback_tcp_store(timeout_s=10) if store is None else store

    def begin(rank):
        client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=10))
        return begin_session(
            client,
            rank=rank,
            num_ranks=len(environs),
            one_host=one_host,
            timeout_s=10,
            environ=environs[rank],
        )

    return in_threads(begin, len(environs))


def codes(found):
    return {each.seal and each.seal.code("x", b"y") for each in found}


def test_ranks_with_a_secret_share_a_key_which_is_another_one_each_time():
    environ = {SECRET: new_secret()}
    first, second = sessions([environ] * 3), sessions([environ] * 3)
    assert len(codes(first)) == len(codes(second)) == 1
    assert codes(first) != codes(second)
    assert None not in codes(first)


def test_ranks_of_one_host_need_no_launcher_for_it():
    found = sessions([{}] * 3, one_host=True)
    assert len(codes(found)) == 1
    assert None not in codes(found)


def test_ranks_of_several_hosts_without_a_secret_have_none():
    assert codes(sessions([{}] * 2)) == {None}


@pytest.mark.parametrize(
    ("environs", "said"),
    [
        ([{SECRET: "a" * 64}, {SECRET: "b" * 64}, {SECRET: "a" * 64}], "rank 1 has another secret"),
        ([{SECRET: "a" * 64}, {SECRET: "a" * 64}, {}], "rank 2 has no secret"),
        ([{}, {SECRET: "a" * 64}, {}], "rank 1 has a"),
    ],
)
@pytest.mark.parametrize("one_host", [False, True])
def test_ranks_with_different_secrets_all_end_at_once(environs, said, one_host):
    found = sessions(environs, one_host=one_host)
    assert all(isinstance(each, LaunchError) for each in found), found
    assert said in str(found[0])
    assert "Start all ranks with the same one" in str(found[0])


@pytest.mark.parametrize("key", ["way", "hello/1", "welcome"])
@pytest.mark.parametrize(
    "value", [b"", b"welcome\n" + b"x" * 64, b"socket /nowhere", b"refused\n\x1b[31mred"]
)
def test_a_stranger_who_is_first_is_not_believed(key, value):
    """What it writes before a rank does is read by those that come: they end, with one line."""
    server = loopback_tcp_store(timeout_s=1)
    store = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=1))
    environ = {SECRET: "a" * 64}
    store.set(key, value)
    rank = 0 if key == "hello/1" else 1
    with pytest.raises((LaunchError, RuntimeError)) as caught:
        begin_session(store, rank=rank, num_ranks=2, one_host=False, timeout_s=1, environ=environ)
    assert "\x1b" not in str(caught.value)


def test_telling_all_asks_the_store_twice_a_rank_however_many_there_are():
    """Each rank read what each other one told: with 1,024 ranks a million questions, six times a group."""

    class Counted:
        def __init__(self, store):
            self.store, self.questions = store, 0

        def set(self, *words):
            self.questions += 1
            self.store.set(*words)

        def get(self, key):
            self.questions += 1
            return self.store.get(key)

    store = HashStore()
    stores = [Counted(store) for _ in range(9)]

    def tell(rank):
        tell_all = tell_all_through(stores[rank], rank, 9)
        return [tell_all({"rank": rank}), tell_all((rank, b"x"))]

    with ThreadPoolExecutor(9) as threads:
        found = list(threads.map(tell, range(9)))
    assert found == [[[{"rank": rank} for rank in range(9)], [(rank, b"x") for rank in range(9)]]] * 9
    assert [each.questions for each in stores] == [2 * 9] + [2 * 2] * 8


@pytest.mark.parametrize("told", [b"x", encode([b"x"]), encode([encode(1), 2]), encode({"a": 1})])
def test_what_the_first_rank_does_not_tell_is_refused(told):
    store = HashStore()
    store.set("0/0", told)
    with pytest.raises(LaunchError, match="rank 0 of the group tells in the store cannot be read"):
        tell_all_through(store, 1, 2)("here")


def test_tell_all_runs_no_pickle_that_stands_in_the_store(tmp_path):
    """It unpickled what stood there: whoever reached the port had its commands run by all ranks."""

    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "run",))

    for seal in (None, SEAL):
        raw = HashStore()
        raw.set("0/1", pickle.dumps(Attack()))
        tell_all = tell_all_through(raw if seal is None else SealedStore(raw, seal), 0, 2)
        with pytest.raises(LaunchError, match="stranger"):
            tell_all("here")
    assert not (tmp_path / "run").exists()


def test_objects_are_unpickled_with_the_code_alone(tmp_path):
    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "run",))

    data = packed({"a", 1}, SEAL, "here")
    assert unpacked(data, SEAL, "here") == {"a", 1}
    for forged, place in ((pickle.dumps(Attack()), "here"), (packed(Attack(), SEAL, "there"), "here")):
        with pytest.raises(ForgedError):
            unpacked(forged, SEAL, place)
        with pytest.raises(UsageError, match="no secret"):
            unpacked(forged, None, place)
    with pytest.raises(UsageError, match=r"set can travel between ranks by pickle alone.*Set one, the same"):
        packed({1}, None, "here")
    assert not (tmp_path / "run").exists()


def test_a_secret_in_a_file_is_for_its_user_alone(tmp_path):
    file = tmp_path / "secret"
    file.write_text(f"{'c' * 64}\n")
    file.chmod(0o600)
    code = seal_of_run({SECRET_FILE: str(file)}).code("x", b"")
    assert code == seal_of_run({SECRET: "c" * 64}).code("x", b"")
    file.chmod(0o644)
    with pytest.raises(LaunchError, match=r"has mode 0644 .* others can read or replace it.*chmod 600"):
        seal_of_run({SECRET_FILE: str(file)})
    with pytest.raises(LaunchError, match="cannot be read: No such file"):
        seal_of_run({SECRET_FILE: str(tmp_path / "none")})
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(LaunchError, match="no regular file"):
        seal_of_run({SECRET_FILE: str(tmp_path / "pipe")})
    with pytest.raises(LaunchError, match=r"has 5 characters, which can be guessed.*openssl rand -hex 32"):
        seal_of_run({SECRET: "abcde"})
    assert seal_of_run({}) is None
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_a_seal_does_not_show_its_key():
    assert "key" not in f"{SEAL!r}{SEAL}"
