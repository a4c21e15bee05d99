"""Models and plans drawn at random: any plan that the planner can make must run exactly.

The planner is replaced by one that takes its own chain, cuts it anywhere that it may be cut, and gives the
stages to ranks as a family of schedules does: so there is nothing in such a plan that a planner with other
costs could not have chosen.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from sharded import QUIET
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences

from shardwright.cluster import Cluster
from shardwright.config import Config
from shardwright.errors import TraceError
from shardwright.mesh import Mesh
from shardwright.model_graph import ModelGraph
from shardwright.plan import Plan
from shardwright.planner.chain import Chain
from shardwright.planner.cuts import manual_stages
from shardwright.planner.draft import make_draft
from shardwright.planner.drafts import tie_variants
from shardwright.planner.fabric import Fabric
from shardwright.planner.model_chain import build_chain
from shardwright.planner.objective import Demands
from shardwright.planner.option_plan import plan_of
from shardwright.planner.workload import Workload
from shardwright.profile import Profile
from shardwright.schedule import place_stages

__all__ = ["Drawn", "Shape", "differences_of_plans", "drawn_plans", "shapes"]

WIDTH, CLASSES, LENGTH = 8, 12, 6

KINDS = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a model with an encoder and a decoder is put together."""

    encoder: int = 2
    decoder: int = 2
    skips: str = ""
    bias: str = ""
    tied: str = ""
    results: str = "tensor"
    between: str = ""
    whole: bool = True
    called_twice: bool = False
    auxiliary: bool = False


def shapes() -> st.SearchStrategy[Shape]:
    return st.builds(
        Shape,
        encoder=st.integers(1, 4),
        decoder=st.integers(1, 4),
        skips=st.sampled_from(("", "add", "concat", "inplace", "memory")),
        bias=st.sampled_from(("", "got", "view", "kept")),
        tied=st.sampled_from(("", "head", "both", "all")),
        results=st.sampled_from(("tensor", "tuple", "dict")),
        between=st.sampled_from(("", "scale", "drop", "identity", "inplace")),
        whole=st.booleans(),
        called_twice=st.booleans(),
        auxiliary=st.booleans(),
    )


class Layer(nn.Module):
    """A unit of a model: it hands on the bias that it gets, and makes one where it gets none."""

    def __init__(self, shape: Shape, *, more: int = 0):
        super().__init__()
        self.shape = shape
        make = _matrix if shape.whole else partial(nn.Linear, bias=False)
        self.up, self.down, self.bias = (
            make(*sizes) for sizes in ((WIDTH + more, 2 * WIDTH), (2 * WIDTH, WIDTH), (WIDTH, 1))
        )

    def forward(self, x: Tensor, bias: Tensor | None = None, memory: Tensor | None = None) -> Any:
        if bias is None:
            bias = _times(x[..., :WIDTH], self.bias)
        elif self.shape.bias == "view":
            bias = bias.view_as(bias)
        y = _times(torch.tanh(_times(x, self.up)), self.down)
        if memory is not None:
            y = y + memory.mean(1, keepdim=True)
        if self.shape.bias:
            y = y * torch.sigmoid(bias)
        y = x[..., :WIDTH] + y
        if self.shape.results == "dict":
            return {"hidden": y, "bias": bias}
        return (y, bias) if self.shape.results == "tuple" or self.shape.bias else y


def _matrix(inputs: int, outputs: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)


def _times(x: Tensor, linear: nn.Module | Tensor) -> Tensor:
    return F.linear(x, linear) if isinstance(linear, Tensor) else linear(x)


class EncoderDecoder(nn.Module):
    """Two stacks of layers, of which the second reads what the first has made."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.source = nn.Embedding(CLASSES, WIDTH)
        self.target = nn.Embedding(CLASSES, WIDTH)
        self.encoder = nn.ModuleList(Layer(shape) for _ in range(shape.encoder))
        more = WIDTH if shape.skips == "concat" else 0
        self.decoder = nn.ModuleList(Layer(shape, more=more) for _ in range(shape.decoder))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        if shape.tied in ("both", "all"):
            self.target.weight = self.source.weight
        if shape.tied in ("head", "all"):
            self.head.weight = self.target.weight

    def forward(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        shape = self.shape
        x, bias, seen = self.source(ids_BT), None, []
        layers = [*self.encoder, *(self.encoder if shape.called_twice else ())]
        for layer in layers:
            x, bias = self._called(layer, x, bias, None)
            x = self._between(x)
            seen.append(x)
        memory, auxiliary = x, x.square().mean()
        y, bias = self.target(ids_BT.flip(1)), None
        for layer in self.decoder:
            skip = seen.pop() if seen and shape.skips not in ("", "memory") else None
            if shape.skips == "concat":
                y = torch.cat([y, torch.zeros_like(y) if skip is None else skip], -1)
            elif shape.skips == "inplace" and skip is not None:
                y = y.clone()
                y += skip
            elif skip is not None:
                y = y + skip
            y, bias = self._called(layer, y, bias, memory if shape.skips == "memory" else None)
            y = self._between(y)
        if not shape.skips:
            y = y + memory.mean(1, keepdim=True)
        logits = self.head(self.norm(y))
        loss = F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())
        return loss + 0.1 * auxiliary if shape.auxiliary else loss

    def _called(self, layer: nn.Module, x: Tensor, bias: Any, memory: Any) -> tuple[Tensor, Any]:
        result = layer(x, bias, memory)
        if isinstance(result, dict):
            x, got = result["hidden"], result["bias"]
        elif isinstance(result, tuple):
            x, got = result
        else:
            x, got = result, None
        if not self.shape.bias:
            return x, None
        return x, bias if self.shape.bias == "kept" and bias is not None else got

    def _between(self, x: Tensor) -> Tensor:
        match self.shape.between:
            case "scale":
                return x * self.scale
            case "drop":
                return F.dropout(x, 0.1, self.training)
            case "identity":
                return x.contiguous().to(x.dtype)
            case "inplace":
                return x.mul_(0.9)
        return x


def loss_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["ids_BT"], batch["targets_BT"])
    return loss


def tokens(batch_size: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(0, CLASSES, (batch_size, length))
    return {"ids_BT": ids, "targets_BT": ids.roll(-1, 1)}


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A plan, as far as it can be told before the model is traced."""

    kind: str = "1f1b"
    stages_per_rank: int = 1
    microbatches: int = 1
    active: int | None = None
    by_hand: bool = False
    keeps_ties: bool = False
    seed: int = 0

    def planner(self) -> Any:
        """What stands in for `make_plan`."""
        return partial(_planned, self)


@st.composite
def drawn_plans(draw: Any) -> Drawn:
    kind = draw(st.sampled_from(KINDS))
    several = {"interleaved_1f1b": st.integers(2, 4), "zb_v": st.just(2)}
    bounded = kind in ("gpipe", "1f1b") and draw(st.booleans())
    return Drawn(
        kind=kind,
        stages_per_rank=draw(several.get(kind, st.just(1))),
        microbatches=draw(st.integers(1, 8)),
        active=draw(st.integers(1, 8)) if bounded else None,
        by_hand=kind not in several and draw(st.booleans()),
        keeps_ties=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def _planned(
    drawn: Drawn,
    candidates: Mapping[int, tuple[ModelGraph, Profile]],
    *,
    cluster: Cluster,
    config: Config,
    mesh: Mesh,
    **settings: Any,
) -> Plan:
    ((microbatches, (graph, profile)),) = candidates.items()
    choose = random.Random(drawn.seed)
    chain = build_chain(graph, profile)
    place = _placed_by_hand if drawn.by_hand else _placed
    kind, chain, cuts, ranks = place(drawn, chain, mesh.pipeline, choose)
    workload = Workload(
        chain,
        num_microbatches=microbatches,
        fabric=Fabric(cluster=cluster, mesh=mesh),
        demands=Demands(active_microbatches=config.active_microbatches, recompute="none"),
    )
    draft = make_draft(workload, kind, ranks, cuts=cuts)
    share = choose.choice((0.0, 0.5, 1.0))
    recomputed = [call for call in range(chain.num_calls) if choose.random() < share]
    option = replace(draft, layout=draft.layout.with_recompute(recomputed)).work_out()
    plan = plan_of(option, graph=graph, config=config, mesh=mesh, options=[option], division=None)
    share = choose.choice((0.0, 0.5, 1.0))
    stages = [
        stage.model_copy(update={"offload": tuple(u for u in stage.units if choose.random() < share)})
        for stage in plan.stages
    ]
    return plan.model_copy(update={"stages": tuple(stages)})


def _placed(
    drawn: Drawn, whole: Chain, pipeline: int, choose: random.Random
) -> tuple[str, Chain, tuple[int, ...], tuple[int, ...]]:
    """The chain, cut where it may be cut, with stages on the ranks of its schedule."""
    kind, per_rank = drawn.kind, drawn.stages_per_rank
    if whole.bound(stages_per_rank=per_rank).num_atoms < pipeline * per_rank:
        kind, per_rank = "1f1b", 1
    chain = whole.bound(stages_per_rank=per_rank)
    if drawn.keeps_ties:
        chain = list(tie_variants(chain, pipeline * per_rank))[-1]
    ranks = place_stages(kind, num_ranks=pipeline, stages_per_rank=per_rank)
    inner = choose.sample(range(1, chain.num_atoms), len(ranks) - 1)
    return kind, chain, tuple(chain.starts[cut] for cut in (0, *sorted(inner), chain.num_atoms)), ranks


def _placed_by_hand(
    drawn: Drawn, whole: Chain, pipeline: int, choose: random.Random
) -> tuple[str, Chain, tuple[int, ...], tuple[int, ...]]:
    """Units on any ranks, as inside of ``sw.partition``."""
    names = list(dict.fromkeys(label.split("#")[0] for label in whole.labels))
    rank_of = dict(zip(names, range(pipeline), strict=False))  # each has one
    rank_of.update((name, choose.randrange(pipeline)) for name in names[pipeline:])
    cuts, ranks = manual_stages([rank_of[label.split("#")[0]] for label in whole.labels], num_ranks=pipeline)
    return drawn.kind, whole.uncontracted(), cuts, ranks


def differences_of_plans(
    cases: Mapping[str, tuple[Recipe, Drawn]], *, batches: tuple[int, ...] = (9, 8), length: int = LENGTH
) -> dict[str, list[str]]:
    """What comes out differently than in a plain loop, by case; on every rank of a process group."""
    found = {}
    for name, (recipe, drawn) in cases.items():
        config = {
            "microbatches": drawn.microbatches,
            "active_microbatches": drawn.active,
            **QUIET,
        }
        iterations = [Iteration(batch_size=size, length=length) for size in batches]
        iterations.append(Iteration(batch_size=batches[-1], length=length, train=False))
        case = Case(config=config, iterations=iterations)
        try:
            with (
                patch("shardwright.torch.measuring.planning.make_plan", drawn.planner()),
                patch("shardwright.torch.offload.offloading.LEAST_BYTES", 1),
            ):
                lines = differences(recipe, case)
        except Exception as error:
            # Units that must share a stage cannot be placed apart by hand.
            if drawn.by_hand and isinstance(error, TraceError) and "sw.partition" in str(error):
                continue
            error.add_note(f"This happened in the case {name!r}.")
            raise
        if lines:
            found[name] = lines
    return found


def recipe_of(shape: Shape) -> Recipe:
    return Recipe(build=partial(EncoderDecoder, shape), batch=tokens, loss=loss_of)
