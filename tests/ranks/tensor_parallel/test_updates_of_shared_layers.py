"""What comes between a backward and an update, where ranks share layers: clipping, overflows, numbers.

Checkpoints of ranks that share layers: any layout goes on from what any other one has saved.
"""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpointed import GLOBAL_BATCH, SAMPLES, training
from test_shared_layers import adamw, case, check, language
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.testing import run_ranks, run_ranks_outcomes


def clips_by_own(model: Any) -> Tensor:
    own = isinstance(model, sw.DistributedModel)
    return (sw.clip_grad_norm_ if own else nn.utils.clip_grad_norm_)(model.parameters(), 0.1, 3.0)


def test_clipping():
    """Parts are summed over the ranks that share layers; what is whole on them counts once."""
    # The other norms are clipped by rows and columns, too: see `test_shards_of_layers.py`.
    stages = case(2, {"pipeline_parallel_degree": 2}, clip=clips_by_own)
    check(language(layers=2, tied=True), {"stages": stages}, num_ranks=4)


class Training:
    """A model that two ranks share, and its step."""

    def __init__(self, settings: dict[str, Any], **scaling: Any):
        self.recipe = language(layers=2)
        sw.init({"run_dir": "off", "profile": "estimated", "microbatches": 2, **settings})
        torch.manual_seed(0)
        self.sw = sw
        self.model = sw.DistributedModel(self.recipe.build())
        self.optimizer = sw.DistributedOptimizer(adamw(self.model), **scaling)
        self.scale = lambda loss: loss

        @sw.step
        def train(model: Any, batch: Any) -> Tensor:
            loss = self.recipe.loss(model, batch)
            model.backward(self.scale(loss))
            return loss

        self._train = train

    def step(self) -> None:
        torch.manual_seed(1)
        self._train(self.model, self.recipe.batch(4, 12))

    def spoil(self, value: float, *, on_rank: int) -> None:
        """Puts a number into the part of a gradient that one rank has."""
        from shardwright.torch.parameters.sharded_tensor import own_part
        from shardwright.torch.tensor_parallel.divided_tensor import local_of

        gradients = [p.grad for p in self.model.local_parameters() if p.grad is not None]
        part = next(local_of(own_part(g)) for g in gradients if local_of(own_part(g)).numel() < g.numel())
        if self.sw.rank() == on_rank:
            part.view(-1)[0] = value

    def values(self) -> Tensor:
        return torch.cat([value.reshape(-1) for value in self.model.state_dict().values()])


LAYERS = {"tensor_parallel_degree": 2}


def test_all_ranks_see_an_overflow_on_one():
    def on_rank():
        training = Training({**LAYERS, "fp16": True}, dynamic_loss_args={"init_scale": 64.0})
        training.step()
        training.optimizer.step()
        first = training.values()
        training.spoil(float("inf"), on_rank=1)
        training.step()  # adds to it
        training.optimizer.step()
        unchanged = torch.equal(first, training.values())
        return training.optimizer.overflow, training.optimizer.loss_scale, unchanged

    assert run_ranks(on_rank, 2) == [(True, 32.0, True)] * 2


def test_ranks_that_share_layers_update_with_the_same_numbers():
    def on_rank():
        training = Training(LAYERS)
        training.step()
        training.optimizer.param_groups[0]["lr"] = 0.1 * (1 + training.sw.tp_rank())
        training.step()

    for outcome in run_ranks_outcomes(on_rank, 2):
        assert "lr of parameter group 0 of AdamW is 0.1 on rank 0 and 0.2 on rank 1" in outcome.error


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


def named(pair: tuple[Layout, Layout]) -> str:
    return " to ".join("x".join(map(str, layout)) for layout in pair)


@pytest.mark.thorough
@pytest.mark.parametrize("pair", SHOWN, ids=named)
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
def test_the_same_layout_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """With dropout, a schedule, a buffer that changes, and data over two epochs."""
    common, kind = {**Layout(2).settings, "bf16": True}, {"dtype": torch.float32}
    whole = run_ranks(training, 2, common, tmp_path / "whole", until=6, **kind)
    settings = {**common, "plan": str(tmp_path / "whole" / "step-00000003" / "plan.json")}
    run_ranks(training, 2, settings, tmp_path / "cut", until=3, **kind)
    rest = run_ranks(training, 2, common, tmp_path / "cut", until=6, first=3, **kind)
    for (losses, state, _), (later, final, _) in zip(whole, rest, strict=True):
        assert later == losses[3:]
        assert state.keys() == final.keys()
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(final[name], value), name
