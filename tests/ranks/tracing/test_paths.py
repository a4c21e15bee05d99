"""Models whose path depends on the batch: traced once for each path, and right on each."""

from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from torch import Tensor
from transparency import Case, Iteration, Recipe, differences
from zoo import classify, features
from zoo_modules import WIDTH, Stack

import shardwright.torch as sw
from shardwright.plan import Plan
from shardwright.run.context import context
from shardwright.testing import RanksFailedError, run_ranks
from shardwright.torch.pytorch.tree import flatten

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")

CONFIG = {"microbatches": 4, "profile": "estimated"}


class LooksAtItsBatch(Stack):
    """Rows of negative sums skip blocks; the result is divided by how many rows are long."""

    def forward(self, x: Tensor) -> Tensor:
        sums = x.sum((1, 2))
        for block in self.blocks if (sums > 0).any() else self.blocks[1::2]:
            x = block(x)
        long = int((sums.abs() > 15).sum())
        return self.head(x) / (1 + long)


class CountsWhereTheBatchSays(Stack):
    """Keeps a mean of what the first block gives, or of what the last one gives."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.blocks[0] if x.sum() > 0 else self.blocks[-1]
        for block in self.blocks:
            x = block(x)
            if block is chosen:
                self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
                x = x - self.mean
        return self.head(x)


def programs_and_differences(recipe: Recipe, case: Case) -> tuple[int, int, list[str]]:
    """How often steps traced what the planner had not, for how many microbatches, and `differences`."""
    import shardwright.torch.execution.program_maker as program_maker

    traced: list[object] = []
    asked: list[object] = []
    plain_trace, plain_of_batch = program_maker.trace_step, program_maker.ProgramMaker.of_batch

    def trace_step(*args, **kwargs):
        traced.append(args)
        return plain_trace(*args, **kwargs)

    def of_batch(self, function, parts, *circumstances):
        asked.extend(parts)
        return plain_of_batch(self, function, parts, *circumstances)

    program_maker.trace_step, program_maker.ProgramMaker.of_batch = trace_step, of_batch
    try:
        found = differences(recipe, case)
    finally:
        program_maker.trace_step, program_maker.ProgramMaker.of_batch = plain_trace, plain_of_batch
    return len(traced), len(asked), found


def test_a_path_that_follows_from_the_batch_changes_between_microbatches():
    recipe = Recipe(build=LooksAtItsBatch, batch=features, loss=classify)
    case = Case(config={**CONFIG, "pipeline": "zb_v"}, iterations=[Iteration()] * 8)
    for num_traces, num_microbatches, found in run_ranks(programs_and_differences, 2, recipe, case):
        assert found == []
        assert num_microbatches == 32
        # At most two ways through the blocks with 0, 1 or 2 long rows each; the planner has seen one.
        assert 1 <= num_traces <= 5


def test_microbatches_of_one_batch_change_a_buffer_on_one_rank():
    """The changes on all ranks but one were lost."""
    recipe = Recipe(build=CountsWhereTheBatchSays, batch=features, loss=classify)
    case = Case(config={**CONFIG, "pipeline": "1f1b"}, iterations=[Iteration()] * 4)
    with pytest.raises(RanksFailedError, match="change the buffer mean on different ranks"):
        run_ranks(differences, 2, recipe, case)


def padded_text(batch_size: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 99, (batch_size, length))
    padding = torch.arange(length) >= torch.randint(length // 2, length, (batch_size, 1))
    return {
        "input_ids": ids.masked_fill(padding, 0),
        "attention_mask": (~padding).long(),
        "labels": ids.masked_fill(padding, -100),
    }


def test_other_tokens_and_other_padding_need_no_other_trace():
    recipe = ARCHITECTURES["BERT"].recipe()
    recipe = Recipe(build=recipe.build, batch=padded_text, loss=recipe.loss, loss_tolerance=1e-6)
    case = Case(config=CONFIG, iterations=[Iteration()] * 4)
    results = run_ranks(
        programs_and_differences, 2, recipe, case, timeout_s=60, env={"TRANSFORMERS_VERBOSITY": "error"}
    )
    for num_traces, num_microbatches, found in results:
        assert found == []
        assert (num_traces, num_microbatches) == (0, 16)  # the planner's trace serves all


def test_a_mask_that_hides_nothing_is_another_path():
    recipe = ARCHITECTURES["BERT"].recipe()

    def batch(batch_size: int, length: int) -> dict[str, Tensor]:
        full = padded_text(batch_size, length)
        full["attention_mask"][::4] = 1  # the first and third microbatch of two rows keep one padded row
        full["attention_mask"][4:] = 1
        return full

    recipe = Recipe(build=recipe.build, batch=batch, loss=recipe.loss, loss_tolerance=1e-6)
    case = Case(config=CONFIG, iterations=[Iteration()] * 3)
    results = run_ranks(
        programs_and_differences, 2, recipe, case, timeout_s=60, env={"TRANSFORMERS_VERBOSITY": "error"}
    )
    for num_traces, _, found in results:
        assert found == []
        assert num_traces == 1  # and the planner's


def plan_of_an_earlier_run(recipe: Recipe) -> Plan:
    sw.init({**CONFIG, "run_dir": "off"})
    model = sw.DistributedModel(recipe.build().to(recipe.dtype))

    @sw.step
    def train(model: Any, batch: Any) -> None:
        model.backward(recipe.loss(model, batch))

    items, structure = flatten(recipe.batch(8, 12))
    train(model, structure.rebuild([x.to(recipe.dtype) if x.is_floating_point() else x for x in items]))
    return context().plan


def test_a_given_plan_takes_one_trace(tmp_path):
    recipe = Recipe(build=Stack, batch=features, loss=classify)
    run_ranks(plan_of_an_earlier_run, 2, recipe)[0].write(tmp_path / "plan.json")
    case = Case(config={"microbatches": 4, "plan": str(tmp_path / "plan.json")})
    assert run_ranks(programs_and_differences, 2, recipe, case) == [(1, 8, [])] * 2


class SkipsABlockInEvaluation(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks if self.training else self.blocks[1:]:
            x = block(x)
        return self.head(x)


def evaluates_after_a_batch_that_could_not_be_traced() -> bool:
    sw.init({**CONFIG, "run_dir": "off"})
    torch.manual_seed(0)
    plain = SkipsABlockInEvaluation().double()
    x = torch.randn(8, 12, WIDTH, dtype=torch.double)
    expected = plain.eval()(x).square().mean()
    model = sw.DistributedModel(plain.train())
    refused = [True]

    @sw.step
    def loss_of(model: Any, x: Tensor) -> Tensor:
        if refused and len(x) == 1:
            raise ValueError("too small")
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    with pytest.raises(ValueError, match="too small"):
        loss_of(model, x[:7])
    refused.clear()
    model.eval()
    return torch.allclose(loss_of(model, x).reduce_mean(), expected)


def test_the_planners_trace_does_not_outlive_a_first_batch_that_fails():
    """A batch with other settings took it: an evaluation that goes another way."""
    assert run_ranks(evaluates_after_a_batch_that_could_not_be_traced, 2) == [True, True]
