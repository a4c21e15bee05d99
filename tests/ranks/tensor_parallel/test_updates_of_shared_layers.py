"""What comes between a backward and an update, where ranks share layers: clipping, overflows, numbers."""

from typing import Any

import pytest
import torch
from test_shared_layers import adamw, case, check, language
from torch import Tensor, nn

from choices import in_sweep
from shardwright.testing import run_ranks, run_ranks_outcomes


def clips_norm(model: Any) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clips_largest(model: Any) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))


def clips_by_own(model: Any) -> Tensor:
    import shardwright.torch as sw

    own = isinstance(model, sw.DistributedModel)
    return (sw.clip_grad_norm_ if own else nn.utils.clip_grad_norm_)(model.parameters(), 0.1, 3.0)


def clips_one(model: Any) -> None:
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_(parameter, 0.02)


def clips_values(model: Any) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


CLIPPING = {
    each.__name__: each for each in (clips_norm, clips_largest, clips_by_own, clips_one, clips_values)
}
MESHES = {
    "layers": (2, {}),
    "stages": (4, {"pipeline_parallel_degree": 2}),
    "replicas": (4, {"pipeline_parallel_degree": 1}),
    "all": (8, {"pipeline_parallel_degree": 2}),
}


@pytest.mark.parametrize("mesh", [in_sweep("layers"), "stages", in_sweep("replicas"), in_sweep("all")])
def test_clipping(mesh):
    """Parts are summed over the ranks that share layers; what is whole on them counts once."""
    num_ranks, settings = MESHES[mesh]
    # The others are clipped by rows and columns, too: see `test_shards_of_layers.py`.
    few = {"stages": ["clips_by_own"], "all": ["clips_norm"]}
    names = few.get(mesh, list(CLIPPING))
    cases = {name: case(2, settings, clip=CLIPPING[name]) for name in names}
    check(language(layers=2, tied=True), cases, num_ranks=num_ranks)


class Training:
    """A model that two ranks share, and its step."""

    def __init__(self, settings: dict[str, Any], **scaling: Any):
        import shardwright.torch as sw

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
