"""What a rank really holds: microbatches alive on it, and bytes at the allocator."""

import weakref

import pytest
import torch
from stacks import train as squares
from torch import nn

import shardwright.torch as sw
from choices import thorough
from shardwright.run.context import context
from shardwright.testing import run_ranks

QUIET = {"run_dir": "off", "profile": "estimated"}
WIDTH = 8


class Alive:
    """Activations that are alive, by microbatch, and the most microbatches with one at a time."""

    now: dict = {}  # noqa: RUF012
    most = 0


def note(activation, microbatch):
    alive = Alive.now

    def gone(reference):
        alive[microbatch].discard(reference)
        if not alive[microbatch]:
            del alive[microbatch]

    alive.setdefault(microbatch, set()).add(weakref.ref(activation.untyped_storage(), gone))
    Alive.most = max(Alive.most, len(alive))


class Wide(nn.Module):
    """Keeps far more activations than it has weights, and than it hands on."""

    def __init__(self, width=32):
        super().__init__()
        self.up = nn.Linear(width, 32 * width)
        self.down = nn.Linear(32 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def peak_of_a_step(settings):
    """The plan's peak and the measured one, and how many units are recomputed and offloaded, on this rank."""
    sw.init({**QUIET, "pipeline": "1f1b", "microbatches": 4, **settings})
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        torch.manual_seed(0)
        model = sw.DistributedModel(nn.Sequential(*(Wide() for _ in range(8))))
        optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

        @sw.step
        def train(model, x):
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        x = torch.randn(4096, 32)
        losses = []
        for index in range(3):
            optimizer.zero_grad()
            with torch.profiler.record_function(f"step {index}"):
                losses.append(train(model, x).reduce_mean().item())
                optimizer.step()
    events = profiler.profiler.kineto_results.events()
    (span,) = (event for event in events if event.name() == "step 2")
    alive = peak = 0
    for block in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        alive += block.nbytes()
        if span.start_ns() <= block.start_ns() <= span.end_ns():
            peak = max(peak, alive)
    plan, rank = context().plan, context().pipeline_rank
    own = [stage for stage in plan.stages if stage.rank == rank]
    keeping_less = sum(len(stage.recompute) for stage in own), sum(len(stage.offload) for stage in own)
    shared = 0 if context().links.local_peers is None else context().links.local_peers.num_bytes
    return plan.prediction.memory[rank].peak_bytes, peak + shared, keeping_less, losses


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "way"),
    [({}, 0), thorough({"activation_checkpointing": "none", "offload_activations": "auto"}, 1)],
    ids=["recomputation", "offload"],
)
def test_a_memory_limit_is_kept(settings, way):
    free = run_ranks(peak_of_a_step, 2, {})
    limit = int(0.7 * max(measured for _, measured, _, _ in free))
    tight = run_ranks(peak_of_a_step, 2, {"memory_limit": limit, **settings})
    assert all(keeping_less == (0, 0) for _, _, keeping_less, _ in free)
    assert max(keeping_less[way] for _, _, keeping_less, _ in tight) >= 1
    assert all(keeping_less[1 - way] == 0 for _, _, keeping_less, _ in tight)
    for predicted, measured, _, _ in tight:
        assert predicted <= limit
        assert measured <= limit
    assert tight[0][3] == pytest.approx(free[0][3])


@pytest.mark.parametrize(
    ("kind", "checkpointing"),
    [("interleaved_1f1b", "none"), ("zb_h1", "full")],
)
def test_the_predicted_peak_is_the_measured_one(kind, checkpointing):
    settings = {"pipeline": kind, "activation_checkpointing": checkpointing}
    for predicted, measured, _, _ in run_ranks(peak_of_a_step, 2, settings):
        assert predicted == pytest.approx(measured, rel=0.1)


def test_what_was_sent_and_received_is_let_go():
    """Messages of all microbatches were kept until the end of the batch."""

    def run():
        from shardwright.comm.transport import Transport
        from shardwright.runtime.action_loop import Messages

        sw.init({**QUIET, "pipeline": "1f1b", "microbatches": 16})
        model = sw.DistributedModel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))
        alive, most = set(), [0]

        def note(tensor):
            if tensor.numel() == 4 * WIDTH:
                alive.add(reference := weakref.ref(tensor.untyped_storage(), lambda r: alive.discard(r)))
                most[0] = max(most[0], len(alive))
                return reference
            return None

        send, receive = Transport.send, Messages.receive
        Transport.send = lambda self, tensor, target: (note(tensor), send(self, tensor, target))[1]

        def received(self, *arguments, **options):
            tensor = receive(self, *arguments, **options)
            note(tensor)
            return tensor

        Messages.receive = received
        train = sw.step(squares)
        train(model, torch.randn(64, WIDTH))
        return most[0]

    for most in run_ranks(run, 2):
        assert 1 <= most <= 8
