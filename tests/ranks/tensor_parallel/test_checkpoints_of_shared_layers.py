"""Checkpoints of ranks that share layers: any layout goes on from what any other one has saved."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpointed import GLOBAL_BATCH, SAMPLES, training

from shardwright.testing import run_ranks


class Layout(NamedTuple):
    """Degrees of a run, and the order of its ranks."""

    tensor: int = 1
    pipeline: int = 1
    replicas: int = 1
    placement: str = "DPT"
    shard: int = 1
    shares_state: bool = False
    context: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline * self.replicas * self.context

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "tensor_parallel_degree": self.tensor,
            "context_parallel_degree": self.context,
            "pipeline_parallel_degree": self.pipeline,
            "placement_strategy": self.placement,
            "sharded_data_parallel_degree": self.shard,
            "shard_optimizer_state": self.shares_state,
            "microbatches": 2,
        }


ONE = Layout()
SHOWN = [
    (ONE, Layout(2, 2, placement="TPD")),
    (Layout(2, 1, 2, shard=2), Layout(3)),
]
MORE = [
    (Layout(2), Layout(2, context=2)),
    (Layout(2, 2), Layout(2, 1, 2, shares_state=True)),
    (Layout(context=2), Layout(2)),
    (Layout(2, 2, context=2), Layout(4)),
    (Layout(2, 1, 2, shard=2, context=2), Layout(1, 2)),
    (Layout(2, 2), ONE),
    (Layout(2, 2), Layout(3)),
    (Layout(3), Layout(4)),
    (Layout(4), Layout(2, 1, 2)),
    (Layout(2, 1, 2, shares_state=True), Layout(2, 1, 2, shard=2)),
    (Layout(context=3), Layout(2)),
    (Layout(3), Layout(2, 2)),
    (Layout(2, 2), Layout(4)),
    (Layout(2, 1, 2), Layout(1, 2, 2)),
    (Layout(2, 2, 2), Layout(4, 2)),
    (Layout(4, 2), Layout(2, 2, 2, "TPD")),
    (Layout(2), Layout(2, 2)),
    (Layout(2, 2, 2, shard=2), Layout(2, 1, 4, shard=2, shares_state=True)),
    (Layout(2, 1, 4, shard=2, shares_state=True), Layout(1, 2, 2, shard=2)),
    (Layout(3, 2), Layout(2, 3)),
]


def named(pair: tuple[Layout, Layout]) -> str:
    return " to ".join("x".join(map(str, layout)) for layout in pair)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "pair",
    [
        *(pytest.param(pair, id=named(pair)) for pair in SHOWN),
        *(pytest.param(pair, id=named(pair), marks=pytest.mark.sweep) for pair in MORE),
    ],
)
def test_any_layout_goes_on_from_what_any_other_has_saved(
    pair: tuple[Layout, Layout], tmp_path: Path
) -> None:
    """Losses and parameters of further steps of AdamW are those of one process without interruption."""
    before, after = pair
    plain, plain_state = _plain()
    saved = run_ranks(training, before.num_ranks, before.settings, tmp_path, until=3, dropout=0.0)
    rest = run_ranks(training, after.num_ranks, after.settings, tmp_path, until=7, first=3, dropout=0.0)
    assert saved[0][0] == pytest.approx(plain[:3], rel=1e-9)
    for losses, state, _ in rest:
        assert losses == pytest.approx(plain[3:], rel=1e-9)
        assert state.keys() == plain_state.keys()
        for name, value in plain_state.items():
            # The mean of calls is that of one replica's samples.
            if isinstance(value, torch.Tensor) and (
                name != "counted.mean" or before.replicas == after.replicas == 1
            ):
                torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-10)
    first_epoch = _samples(saved, before, steps=3) + _samples(rest, after, steps=2)
    assert sorted(first_epoch) == list(range(SAMPLES))


@cache
def _plain() -> tuple[list[float], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        losses, state, _ = run_ranks(training, 1, ONE.settings, Path(folder), until=7, dropout=0.0)[0]
    return losses, state


def _samples(results: list[Any], layout: Layout, *, steps: int) -> list[int]:
    """What all replicas have seen in the first steps; ranks of a replica see the same."""
    of_replicas = {tuple(seen) for _, _, seen in results}
    assert len(of_replicas) == layout.replicas
    share = GLOBAL_BATCH // layout.replicas
    return [sample for seen in of_replicas for sample in seen[: steps * share]]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(2), {"dtype": torch.float32, "bf16": True}),
    ],
    ids=str,
)
def test_the_same_layout_goes_on_with_the_same_bits(
    layout: Layout, options: dict[str, Any], tmp_path: Path
) -> None:
    """With dropout, a schedule, a buffer that changes, and data over two epochs."""
    common = {**layout.settings, **{key: True for key in ("bf16", "fp16") if options.get(key)}}
    options = {key: value for key, value in options.items() if key not in ("bf16", "fp16")}
    whole = run_ranks(training, layout.num_ranks, common, tmp_path / "whole", until=6, **options)
    settings = {**common, "plan": str(tmp_path / "whole" / "step-00000003" / "plan.json")}
    run_ranks(training, layout.num_ranks, settings, tmp_path / "cut", until=3, **options)
    rest = run_ranks(training, layout.num_ranks, common, tmp_path / "cut", until=6, first=3, **options)
    for (losses, state, _), (later, final, _) in zip(whole, rest, strict=True):
        assert later == losses[3:]
        assert state.keys() == final.keys()
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(final[name], value), name
