"""The process group: its store, its generations, its end."""

import contextlib
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

import shardwright.torch as sw
from shardwright.comm.joining.process_group import (
    _hand_out,
    destroy_process_group,
    group_of,
    init_process_group,
)
from shardwright.comm.joining.session import Session
from shardwright.comm.launchers import detect
from shardwright.errors import LaunchError
from shardwright.run.context import context
from shardwright.testing import RanksFailedError, run_ranks


def total():
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    return value.item()


def join_and_sum():
    store = init_process_group(detect(os.environ), backend="gloo", timeout_s=30)
    store.set(f"key of {dist.get_rank()}", "set")
    found = total()
    # A key that another rank has set may still be under way: `get` waits for it, `check` does not.
    seen = all(store.get(f"key of {rank}") == b"set" for rank in range(dist.get_world_size()))
    destroy_process_group()
    return found, seen


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_at_the_store_of_the_launcher(num_ranks):
    found = run_ranks(join_and_sum, num_ranks, init_process_group=False)
    assert found == [(sum(range(num_ranks)), True)] * num_ranks


def test_at_a_store_that_rank_0_serves():
    env = {"TORCHELASTIC_USE_AGENT_STORE": None, "MASTER_PORT": str(free_port())}
    assert run_ranks(join_and_sum, 2, init_process_group=False, env=env) == [(1.0, True)] * 2


def test_a_second_group_does_not_meet_the_first_one_s_keys():
    def twice():
        return [join_and_sum() for _ in range(3)]

    assert run_ranks(twice, 2, init_process_group=False) == [[(1.0, True)] * 3] * 2


def test_a_later_generation_does_not_meet_the_addresses_of_the_earlier_one():
    def live_again():
        found = []
        for generation in range(3):
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(generation)
            # A new life is a new process: it has made no group before.
            import itertools

            from shardwright.comm.joining import process_group

            process_group._NUMBER_OF_GROUP = itertools.count()
            found.append(join_and_sum())
        return found

    assert run_ranks(live_again, 2, init_process_group=False) == [[(1.0, True)] * 3] * 2


class _GreetsAgain(dict):
    """A store in which rank 1 confirms, and greets for its next life, while rank 0 asks for the first."""

    def add(self, key, number):
        self[key] = self.get(key, 0) + number
        return self[key]

    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key, default=None):
        return dict.get(self, key, default)

    def check(self, keys):
        found = all(key in self for key in keys)
        if "/confirm/" in keys[0] and not found and "shardwright/generation/welcome/first" in self:
            self.set(keys[0], "first")
            self.set("shardwright/generation/hello/1", "second")
        return found


def test_who_greets_for_the_next_life_is_not_given_the_number_of_this_one():
    store = _GreetsAgain({"shardwright/generation/hello/1": b"first"})
    assert _hand_out(store, 2, timeout_s=5) == 1
    assert "shardwright/generation/welcome/second" not in store


def test_hosts_that_count_restarts_differently_agree_on_a_generation():
    def join():
        from datetime import timedelta

        from shardwright.comm.joining.process_group import agree_on_generation

        environment = detect(os.environ)
        store = dist.TCPStore(
            environment.master_addr, environment.master_port, is_master=False, timeout=timedelta(seconds=30)
        )
        if environment.rank == 1:  # what a dead rank of an earlier life left
            store.set("shardwright/generation/hello/1", "a dead rank's token")
        return [agree_on_generation(store, environment, timeout_s=30) for _ in range(3)]

    found = run_ranks(
        join,
        4,
        init_process_group=False,
        env=lambda rank: {
            "LOCAL_WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank % 2),
            "TORCHELASTIC_RESTART_COUNT": str(rank // 2),
        },
    )
    assert found == [[1, 2, 3]] * 4


@pytest.mark.parametrize(
    ("launcher_serves_store", "said"),
    [
        ("True", r"Rank 0 waited 0.5 s at the start, but of 2 ranks.*: 1. Look into"),
        (None, r"could not join the gloo process group within 0.5 s: rank 1 did not come"),
    ],
)
def test_a_rank_that_does_not_come_is_named(launcher_serves_store, said):
    def join():
        environment = detect(os.environ)
        if environment.rank == 1:
            return
        init_process_group(environment, backend="gloo", timeout_s=0.5)

    env = {"TORCHELASTIC_USE_AGENT_STORE": launcher_serves_store}
    with pytest.raises(RanksFailedError, match=said):
        run_ranks(
            join,
            2,
            init_process_group=False,
            env=env if launcher_serves_store else {**env, "MASTER_PORT": str(free_port())},
        )


def test_two_default_groups_are_refused():
    def join():
        init_process_group(detect(os.environ), backend="gloo", timeout_s=30)

    with pytest.raises(RanksFailedError, match="There is a default process group already"):
        run_ranks(join, 1)


def _one_of_two(rank, address, port, **others):
    places = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return detect({**{f"SHARDWRIGHT_{name}": value for name, value in places.items()}, **others})


def test_a_master_that_does_not_resolve_is_named_at_once():
    environment = _one_of_two(
        1, "no-such-host.invalid", 29500, SHARDWRIGHT_LOCAL_RANK="0", SHARDWRIGHT_LOCAL_WORLD_SIZE="1"
    )
    with pytest.raises(
        LaunchError, match=r"the host name 'no-such-host.invalid' does not resolve.*Set MASTER_ADDR"
    ):
        init_process_group(environment, backend="gloo", timeout_s=30)


def test_a_store_that_nobody_serves_is_named():
    environment = _one_of_two(1, "127.0.0.1", free_port())
    with pytest.raises(LaunchError, match=r"did not reach the store of rank 0 at 127.0.0.1:.* within 1 s"):
        init_process_group(environment, backend="gloo", timeout_s=1)


def test_a_rank_that_is_left_while_it_joins_says_so(monkeypatch):
    """It said that nothing had come within 300 s, after a fraction of a second."""

    def lose(*args, **kwargs):
        raise RuntimeError("Connection was likely closed")

    monkeypatch.setattr(dist, "init_process_group", lose)
    monkeypatch.setattr(
        "shardwright.comm.joining.process_group.begin_session", lambda *_, **__: Session(None)
    )
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = _one_of_two(1, "127.0.0.1", store.port)
    with pytest.raises(
        LaunchError,
        match=r"gave up after .*s, before timeout_s \(30 s\) was over: another rank has most likely failed "
        r"or ended while it joined\. Look into the logs of the others first\. .*Connection was likely closed",
    ):
        init_process_group(environment, backend="gloo", timeout_s=30)


def test_a_port_that_is_taken_is_named():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        environment = _one_of_two(0, "127.0.0.1", port)
        with pytest.raises(
            LaunchError, match=rf"cannot serve the store at 127.0.0.1:{port}.*set MASTER_PORT"
        ):
            init_process_group(environment, backend="gloo", timeout_s=5)


def test_a_single_process_needs_no_network():
    def alone():
        store = init_process_group(detect({}), backend="gloo", timeout_s=30)
        return total(), type(store.underlying_store).__name__

    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = run_ranks(alone, 1, init_process_group=False, env=dict.fromkeys(names))
    assert found == [(0.0, "HashStore")]


def test_runs_of_one_process_share_their_groups():
    """Each run made its own, and the threads of all woke up a hundred times a second until the end."""

    def groups_of_runs():
        groups, threads = [], []
        for timeout_s in (60, 60, 60, 61):
            sw.init({"microbatches": 2, "run_dir": "off", "timeout_s": timeout_s})
            groups.append(context().groups.pipeline)
            threads.append(len(list(Path("/proc/self/task").iterdir())))
            sw.shutdown()
        return [group is groups[0] for group in groups], [number > threads[0] for number in threads]

    assert run_ranks(groups_of_runs, 2) == [([True] * 3 + [False], [False] * 3 + [True])] * 2


def test_groups_do_not_outlive_their_default_group():
    def make_twice():
        made = []
        for _ in range(2):
            init_process_group(detect(os.environ), backend="gloo", timeout_s=30)
            made.append(group_of((0, 1), use="test", timeout_s=30))
            value = torch.ones(1)
            dist.all_reduce(value, group=made[-1])
            assert value.item() == 2.0
            destroy_process_group()
        return made[0] is made[1]

    assert run_ranks(make_twice, 2, init_process_group=False) == [False] * 2


def test_a_run_after_a_failed_step_makes_its_groups_anew():
    """A sum that one rank had begun and nobody had taken was added to the first sum of the next run."""

    def fails_in_the_middle():
        sums = []
        for fails in (True, False):
            sw.init({"pipeline_parallel_degree": 1, "microbatches": 2, "run_dir": "off"})
            group = context().groups.data
            model = sw.DistributedModel(torch.nn.Linear(2, 1))

            @sw.step
            def train_step(model, x, fails=fails, group=group):
                if fails:
                    if dist.get_rank() == 0:
                        dist.all_reduce(torch.full((1,), 100.0), group=group, async_op=True)
                    raise ValueError("in the middle")
                loss = model(x).sum()
                model.backward(loss)
                return loss

            with contextlib.suppress(ValueError):
                train_step(model, torch.ones(4, 2))
            value = torch.ones(1)
            if not fails:
                dist.all_reduce(value, group=group)
            sums.append(value.item())
            sw.shutdown()
        return sums

    assert run_ranks(fails_in_the_middle, 2) == [[1.0, 2.0]] * 2
