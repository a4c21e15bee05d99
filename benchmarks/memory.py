"""Section H: predicted against measured memory, by two measures that a CPU allows.

*Live bytes*: the peak, over a whole step with AdamW, of the bytes that PyTorch's CPU allocator has given out
and not taken back: weights, gradients, optimizer state, activations, batches, messages, temporaries of
operations, and the scratch memory that oneDNN takes for its kernels. The allocator reports every block to the
profiler, which counts from before the batch is made and the model is built; nothing is left out, nothing is
estimated. The memory that a rank shares with others of its host, for the messages that it sends, is added.
This is what the plan calls its peak, and has the target. What Python, gloo and oneDNN hold beside tensors
belongs to no model and is not counted: the resident set of a rank is 5 to 20 MiB larger.

*Saved bytes*: every tensor that autograd keeps for a backward is seen by a pair of hooks; what counts is the
storage behind it, once, from the first save to the end of the last backward that needs it. Weights, inputs
and targets do not count. It has no target: the plan's activations are these, and what no hook sees: values
that are kept to be sent back to, and what `I` leaves for `W` in the schedules that split the backward.
"""

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from check import Check
from live_bytes import LiveBytes
from models import Task, conv_net, gpt, with_adapters
from shardwright.run.context import context
from shardwright.testing import run_ranks
from shardwright_side import STAGES_PER_RANK, Ours

__all__ = ["Footprint", "measure_memory", "memory_check", "memory_table"]

_MICROBATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of one rank.

    Attributes:
        task: what was trained.
        settings: with which settings.
        rank: pipeline rank.
        predicted_saved: the plan's activations.
        saved: measured with hooks.
        predicted_peak: the plan's peak.
        live: measured at the allocator.
    """

    task: str
    settings: str
    rank: int
    predicted_saved: int
    saved: int
    predicted_peak: int
    live: int

    @property
    def saved_error(self) -> float:
        """Predicted against measured."""
        return self.predicted_saved / self.saved - 1

    @property
    def peak_error(self) -> float:
        """Predicted against measured."""
        return self.predicted_peak / self.live - 1


def measure_memory(*, quick: bool) -> list[Footprint]:
    """A few models and schedules, each on fresh processes."""
    blocks = gpt(layers=4, width=16, length=64) if quick else gpt(layers=8, batch=32)
    uneven = gpt(layers=4, vocab=16384, batch=16, name="GPT 4 x 256, vocabulary 16384")
    net = conv_net(width=16, size=128)
    full = {"activation_checkpointing": "full"}
    cases: list[tuple[int, Task, dict[str, Any]]] = [
        *((2, blocks, {"pipeline": kind}) for kind in STAGES_PER_RANK),
        *((4, blocks, {"pipeline": kind}) for kind in STAGES_PER_RANK),
        *((2, blocks, {"pipeline": kind, **full}) for kind in ("1f1b", "gpipe", "zb_h1", "zb_v")),
        (4, blocks, {"pipeline": "1f1b", **full}),
        *((ranks, uneven, {"pipeline": "1f1b"}) for ranks in (2, 4)),
        (2, uneven, {"pipeline": "gpipe"}),
        (2, uneven, {"pipeline": "1f1b", **full}),
        *((2, net, {"pipeline": kind}) for kind in STAGES_PER_RANK),
        (2, net, {"pipeline": "1f1b", **full}),
        (4, net, {"pipeline": "1f1b"}),
        *((2, with_adapters(gpt(width=512, layers=4)), {"pipeline": kind}) for kind in ("1f1b", "zb_h1")),
        (2, with_adapters(gpt(width=512, layers=4)), {"pipeline": "1f1b", **full}),
    ]
    found: list[Footprint] = []
    for ranks, task, settings in cases[:1] if quick else cases:
        given = {"virtual_stages": 2, **settings} if settings["pipeline"] == "interleaved_1f1b" else settings
        found += run_ranks(_measure, ranks, task, given, timeout_s=300)
    return found


def memory_table(found: Sequence[Footprint]) -> list[list[str]]:
    """Rank by rank."""
    header = [
        "model",
        "settings",
        "rank",
        "activations",
        "saved",
        "error",
        "peak",
        "live",
        "error",
    ]
    rows = [
        [
            f.task,
            f.settings,
            str(f.rank),
            _mib(f.predicted_saved),
            _mib(f.saved),
            f"{f.saved_error:+.1%}",
            _mib(f.predicted_peak),
            _mib(f.live),
            f"{f.peak_error:+.1%}",
        ]
        for f in found
    ]
    return [header, *rows]


def memory_check(found: Sequence[Footprint]) -> list[Check]:
    """The worst peak."""
    worst = max(found, key=lambda footprint: abs(footprint.peak_error))
    close = sum(abs(footprint.peak_error) <= 0.1 for footprint in found)
    where = f"{worst.task}, {worst.settings}, rank {worst.rank}; {close} of {len(found)} within 10 %"
    return [
        Check(
            section="H",
            what="predicted peak against live bytes: worst",
            value=abs(worst.peak_error),
            target=0.1,
            where=where,
            percent=True,
        )
    ]


def _measure(task: Task, settings: dict[str, Any]) -> Footprint:
    settings = {"microbatches": _MICROBATCHES, "profile": "estimated", **settings}
    with LiveBytes() as allocator:
        ours = Ours(task, task.build(), settings)
        optimizer = torch.optim.AdamW(ours.model.local_parameters())
        for _ in range(2):
            ours.step()
            optimizer.step()
        gc.collect()
        with allocator.counted():
            ours.step()
            optimizer.step()
    peers = context().links.local_peers
    shared = 0 if peers is None else peers.num_bytes
    ledger = _Ledger(ours)
    with torch.autograd.graph.saved_tensors_hooks(ledger.pack, ledger.unpack):
        ours.step()
    rank = dist.get_rank()
    assert ours.plan.prediction is not None
    predicted = ours.plan.prediction.memory[rank]
    return Footprint(
        task=task.name,
        settings=", ".join([f"{dist.get_world_size()} ranks", *map(str, list(settings.values())[2:])]),
        rank=rank,
        predicted_saved=predicted.activations_bytes,
        saved=ledger.peak,
        predicted_peak=predicted.peak_bytes,
        live=allocator.peak + shared,
    )


class _Ledger:
    """Counts the bytes that autograd keeps, each storage once."""

    def __init__(self, ours: Ours):
        known = [*ours.model.parameters(), *ours.model.buffers(), *ours.batch]
        self._others = {t.untyped_storage().data_ptr() for t in known if not t.is_meta}
        self._uses: Counter[int] = Counter()
        self._bytes = 0
        self.peak = 0

    def pack(self, tensor: Tensor) -> "_Kept":
        """Called when a tensor is saved."""
        return _Kept(self, tensor)

    def unpack(self, kept: "_Kept") -> Tensor:
        """Called when it is needed."""
        return kept.tensor

    def add(self, tensor: Tensor) -> int | None:
        """Starts to count a storage; None for one that is no activation."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key in self._others:
            return None
        self._uses[key] += 1
        if self._uses[key] == 1:
            self._bytes += storage.nbytes()
            self.peak = max(self.peak, self._bytes)
        return key

    def drop(self, key: int, num_bytes: int) -> None:
        """One that kept it is gone."""
        self._uses[key] -= 1
        if not self._uses[key]:
            self._bytes -= num_bytes


class _Kept:
    """A saved tensor; it leaves the ledger when autograd lets go of it."""

    def __init__(self, ledger: _Ledger, tensor: Tensor):
        self.tensor = tensor
        self._ledger = ledger
        self._key = ledger.add(tensor)

    def __del__(self) -> None:
        if self._key is not None:
            self._ledger.drop(self._key, self.tensor.untyped_storage().nbytes())


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
