"""The loop over actions, with numbers in place of tensors: a front end needs no framework to stand on it."""

import queue
import threading

import pytest

from shardwright.model_graph import TensorSpec
from shardwright.runtime.action_loop import Messages, run_actions
from shardwright.runtime.homes import Crossing, gradients_of
from shardwright.schedule import Kind, build_schedule, chain_edges, lower, place_stages

WEIGHTS = (2.0, 3.0, 5.0, 7.0)
SPEC = TensorSpec((), "float64", 8, requires_grad=True)


class Program:
    """Each stage multiplies what it reads by its weight."""

    def __init__(self, stage_ranks):
        self.stage_ranks, self.state = stage_ranks, {}
        self.crossings = {
            (s, s + 1): (Crossing(s, s, s + 1, SPEC, has_gradient=True),) for s in range(len(stage_ranks) - 1)
        }
        self.gradients = gradients_of(self.crossings)


class Receipt:
    """The n-th receive that was posted gets the n-th number that was sent."""

    def __init__(self, sent, arrived):
        self._sent, self._arrived, self._number = sent, arrived, arrived["posted"]
        arrived["posted"] += 1

    def wait(self):
        while self._number not in self._arrived:
            self._arrived[self._arrived["taken"]] = self._sent.get(timeout=20)
            self._arrived["taken"] += 1
        return self._arrived.pop(self._number)


class Channels:
    def __init__(self, queues, rank):
        self._queues, self._rank = queues, rank
        self._arrived = {source: {"posted": 0, "taken": 0} for source, _ in queues}

    def post_receive(self, crossing, source):
        return Receipt(self._queues[source, self._rank], self._arrived[source])

    def send(self, tensor, crossing, target):
        self._queues[self._rank, target].put(tensor)


class NumberStage:
    """``y = x * weight``; the last stage's loss is y."""

    def __init__(self, number, program, messages, batch, kept):
        self.number, self.program, self.messages, self.batch = number, program, messages, batch
        self.values, self.gradients = kept
        self.read, self.gradient_of_output = {}, {}
        self.weight, self.gradient, self.last = WEIGHTS[number], 0.0, []
        self.away, self.copies = {}, []

    def forward(self, m):
        self.read[m] = self._from(m, self.number - 1) if self.number else self.batch[m]
        self.values[self.number, m] = self.read[m] * self.weight

    def backward(self, m, *, is_last):
        self.backward_input(m)
        self.backward_weight(m, is_last=is_last)

    def backward_input(self, m):
        following = self.number + 1
        given = 1.0 if following == len(WEIGHTS) else self._gradient(m, following)
        self.gradient_of_output[m] = given
        self.gradients[self.number, m] = given * self.weight

    def backward_weight(self, m, *, is_last):
        self.gradient += self.gradient_of_output.pop(m) * self.read.pop(m)
        self.last.append(is_last)

    def offload(self, m):
        self.away[m] = self.read.pop(m)
        self.copies.append((Kind.OFFLOAD, m))

    def load(self, m):
        self.read[m] = self.away.pop(m)
        self.copies.append((Kind.LOAD, m))

    def to_send(self, m, crossing):
        return self.values.pop((crossing.value, m))

    def gradient_to_send(self, m, crossing):
        return self.gradients.pop((crossing.target, m))

    def _from(self, m, source):
        crossing = self.program.crossings[source, self.number][0]
        here = self.program.stage_ranks[source] == self.program.stage_ranks[self.number]
        return self.values.pop((source, m)) if here else self.messages.receive(m, crossing)

    def _gradient(self, m, target):
        crossing = self.program.crossings[self.number, target][0]
        here = self.program.stage_ranks[target] == self.program.stage_ranks[self.number]
        if here:
            return self.gradients.pop((target, m))
        return self.messages.receive(m, crossing, is_gradient=True)


def run_on_threads(schedule, batch):
    program = Program(schedule.stage_ranks)
    ranks = range(schedule.num_ranks)
    queues = {(a, b): queue.Queue() for a in ranks for b in ranks}
    stages, rows = {}, {}

    def run(rank):
        messages, kept = Messages(Channels(queues, rank), [program] * len(batch)), ({}, {})
        own = {
            number: NumberStage(number, program, messages, batch, kept)
            for number, owner in enumerate(schedule.stage_ranks)
            if owner == rank
        }
        stages.update(own)
        rows[rank] = run_actions(schedule, rank, own, messages, bytes_in_use=lambda: rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return stages, rows


@pytest.mark.parametrize("kind", ["1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_v"])
def test_gradients_are_those_of_a_plain_loop(kind):
    batch = [1.0, 2.0, 3.0, 4.0]
    num_ranks = 2 if kind in ("interleaved_1f1b", "zb_v") else 4
    stage_ranks = place_stages(kind, num_ranks=num_ranks, stages_per_rank=len(WEIGHTS) // num_ranks)
    plain = build_schedule(kind, stage_ranks=stage_ranks, num_microbatches=len(batch))
    schedule = lower(plain, chain_edges(len(WEIGHTS)))
    stages, rows = run_on_threads(schedule, batch)
    product = 2.0 * 3.0 * 5.0 * 7.0
    for number, weight in enumerate(WEIGHTS):
        assert stages[number].gradient == sum(batch) * product / weight
        assert stages[number].last == [False] * (len(batch) - 1) + [True]
    for rank, row in rows.items():
        computed = [action for action in schedule.actions[rank] if action.is_compute]
        assert [event[0] for event in row.events] == computed
        assert row.memory == [rank] * len(computed)
        assert all(end >= start and 0 <= waited <= end - start for _, start, end, waited in row.events)


def test_the_loop_walks_the_rows_alone():
    stage_ranks = (0, 1, 2, 3)
    schedule = lower(
        build_schedule("1f1b", stage_ranks=stage_ranks, num_microbatches=1, forward_only=True),
        chain_edges(len(WEIGHTS)),
    )
    stages, rows = run_on_threads(schedule, [1.0])
    assert all(stage.gradient == 0 for stage in stages.values())
    assert {event[0].kind for row in rows.values() for event in row.events} == {Kind.FORWARD}


@pytest.mark.parametrize("kind", ["1f1b", "gpipe", "zb_h1"])
def test_what_is_offloaded_is_loaded_before_its_backward(kind):
    """A stage whose inputs are away would fail in its backward."""
    batch = [1.0, 2.0, 3.0, 4.0]
    plain = build_schedule(kind, stage_ranks=(0, 1, 2, 3), num_microbatches=len(batch))
    schedule = lower(plain.with_host_copies({0, 2}), chain_edges(len(WEIGHTS)))
    stages, rows = run_on_threads(schedule, batch)
    product = 2.0 * 3.0 * 5.0 * 7.0
    for number, weight in enumerate(WEIGHTS):
        assert stages[number].gradient == sum(batch) * product / weight
        assert stages[number].copies == [
            (action.kind, action.microbatch)
            for action in schedule.actions[number]
            if action.kind in (Kind.OFFLOAD, Kind.LOAD)
        ]
        assert len(stages[number].copies) == (8 if number in (0, 2) else 0)
    assert all(event[0].is_compute for row in rows.values() for event in row.events)
