"""What goes into a step and comes out of it: inputs with gradients, other ways to call backward, failures."""

from typing import Any

import pytest
import torch
from stacks import Stack, apart, batches, start
from stacks import train as squares
from torch import Tensor

from choices import some_combinations
from shardwright.errors import UsageError
from shardwright.testing import RanksFailedError, run_ranks


class SkipsTheBlocks(Stack):
    """The first and the last stage read the input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.head(x)


@pytest.mark.parametrize(
    ("config", "is_leaf", "frozen"),
    some_combinations(
        [{}, {"pipeline": "interleaved_1f1b", "virtual_stages": 2}],
        [True, False],
        [True, False],
        together=1,
    ),
)
def test_the_gradient_of_an_input_is_that_of_all_stages(config, is_leaf, frozen):
    def job():
        sw, plain, model = start(SkipsTheBlocks, config)
        for module in (plain, model.module):
            module.blocks.requires_grad_(not frozen)
        train = sw.step(squares)
        mine, theirs = (batches(0, 1)[0].requires_grad_() for _ in range(2))
        for _ in range(2):  # they add up
            train(model, mine if is_leaf else mine.exp())
            x = theirs if is_leaf else theirs.exp()
            for part in x.tensor_split(4):
                (plain(part).square().mean() / 4).backward(retain_graph=True)
        return (mine.grad - theirs.grad).abs().max().item(), apart(plain, model)

    for worst, differing in run_ranks(job, 2):
        assert worst < 1e-12
        assert differing == []


@pytest.mark.parametrize(("num_ranks", "config"), [(2, {}), (1, {}), (2, {"pipeline_parallel_degree": 1})])
def test_inputs_that_share_a_graph_get_their_gradients(num_ranks, config):
    """The second one met a graph that was freed: with stages, and with microbatches on one rank."""

    def job():
        sw, plain, model = start(Stack, config)
        mine, theirs = (batches(0, 1)[0].requires_grad_() for _ in range(2))

        @sw.step
        def train(model: Any, x: Tensor, factor: Tensor) -> None:
            model.backward((model(x) * factor.mean(2, keepdim=True)).square().mean())

        x, own = mine.exp(), theirs.exp()
        train(model, x, x.sin())
        (plain(own) * own.sin().mean(2, keepdim=True)).square().mean().backward()
        return (mine.grad - theirs.grad).abs().max().item()

    assert max(run_ranks(job, num_ranks)) < 1e-12


def test_parameters_behind_an_input_are_averaged_over_replicas():
    """With several microbatches, each replica kept the gradient of its own batch."""

    def job():
        sw, plain, model = start(Stack, {"pipeline_parallel_degree": 1, "microbatches": 2})
        train, (x,) = sw.step(squares), batches(0, 1)
        train(model, x.chunk(2)[sw.rank()] * model.module.head.weight.mean())
        plain(x * plain.head.weight.mean()).square().mean().backward()
        return apart(plain, model)

    assert run_ranks(job, 2) == [[], []]


@pytest.mark.parametrize("config", [{}, {"pipeline_parallel_degree": 1}])
def test_torch_autograd_backward_is_the_backward(config):
    def job():
        sw, plain, model = start(Stack, config)

        @sw.step
        def train(model: Any, x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            torch.autograd.backward(loss)
            return loss

        xs = batches(0, sw.dp_size())
        train(model, xs[sw.dp_rank()])
        for part in (part for x in xs for part in x.tensor_split(4)):
            (plain(part).square().mean() / 4 / len(xs)).backward()
        return apart(plain, model)

    assert run_ranks(job, 2) == [[], []]


@pytest.mark.parametrize("config", [{}, {"pipeline_parallel_degree": 1}])
def test_what_backward_cannot_do_is_refused(config):
    def job():
        sw, _, model = start(Stack, config)

        @sw.step
        def train(model: Any, x: Tensor, options: Any) -> Tensor:
            loss = model(x).square().mean()
            loss.backward(**options)
            return loss

        texts = []
        for options in (
            {"retain_graph": True},
            {"create_graph": True},
            {"inputs": list(model.module.head.parameters())},
        ):
            try:
                train(model, batches(0, 1)[0], options)
            except UsageError as error:
                texts.append(str(error).split("(")[1].split("=")[0])
        return texts

    assert run_ranks(job, 2) == [["create_graph", "inputs"]] * 2


def test_a_parameter_is_not_returned():
    def job():
        sw, _, model = start(Stack, {})

        @sw.step
        def evaluate(model: Any, x: Tensor) -> Any:
            return model(x), model.module.head.bias

        return evaluate(model, batches(0, 1)[0])

    with pytest.raises(RanksFailedError, match=r"returns the parameter or buffer head\.bias itself"):
        run_ranks(job, 2)


def test_no_step_follows_one_that_failed_in_its_middle():
    def job():
        sw, _, model = start(Stack, {})
        fails: list[bool] = []

        @sw.step
        def train(model: Any, x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            model.backward(loss)
            if fails:
                raise ValueError("no more")
            return loss

        train(model, batches(0, 1)[0])
        fails.append(True)
        texts = []
        for number in (1, 2):
            try:
                train(model, batches(number, 1)[0])
            except (ValueError, RuntimeError) as error:
                texts.append(str(error))
        return texts

    for texts in run_ranks(job, 2):
        assert "no more" in texts[0]
        assert "an earlier step failed in its middle" in texts[1]
        assert "ValueError: no more" in texts[1]


def test_gradients_of_earlier_steps_survive_a_step_that_failed_on_replicas():
    def job():
        sw, plain, model = start(Stack, {"pipeline_parallel_degree": 1})

        @sw.step
        def train(model: Any, x: Tensor, fails: bool) -> Tensor:
            loss = model(x).square().mean()
            if fails:
                raise ValueError("a bad batch")
            model.backward(loss)
            return loss

        for number, fails in enumerate((False, True, False)):
            xs = batches(number, sw.dp_size())
            try:
                train(model, xs[sw.dp_rank()], fails)
            except ValueError:
                continue
            for part in (part for x in xs for part in x.tensor_split(4)):
                (plain(part).square().mean() / 4 / len(xs)).backward()
        return apart(plain, model)

    assert run_ranks(job, 2) == [[], []]


def with_options(model: Any, x: Tensor, weights: Tensor, **options: Any) -> Tensor:
    return model(x).square().mean() * weights.sum()


def with_more(model: Any, x: Tensor, *weights: Tensor, scale: float = 1.0) -> Tensor:
    return model(x).square().mean() * torch.stack([w.sum() for w in weights]).mean() * scale


@pytest.mark.parametrize(("function", "num_weights"), [(with_options, 1), (with_more, 2)])
@pytest.mark.parametrize("cut", [False, True])
def test_arguments_of_functions_that_take_any_go_by_their_names(function, num_weights, cut):
    """What was named was cut as everything else, where the step function has ``**options``."""

    def job():
        sw, plain, model = start(Stack, {})
        named = {"input_split_axes": {"weights": 1}} if cut else {"non_split_inputs": ["weights"]}
        weights = torch.arange(40.0, dtype=torch.float64).view(5, 8)
        x = batches(0, 1)[0]
        with torch.no_grad():
            found = sw.step(**named)(function)(model, x, *[weights] * num_weights)
            parts = zip(x.tensor_split(4), weights.tensor_split(4, 1), strict=True)
            expected = [function(plain, part, some if cut else weights) for part, some in parts]
        torch.testing.assert_close(found.outputs, expected)

    run_ranks(job, 1)


def test_a_batch_that_is_not_cut_is_one_microbatch():
    """A graph, of which no tensor has a row for each sample, was refused over stages."""

    def job():
        sw, plain, model = start(Stack, {"microbatches": None})

        def loss_of(model: Any, nodes: Tensor, edges: Tensor) -> Tensor:
            sources, targets = edges
            return model(nodes.index_add(0, targets, nodes[sources])).square().mean()

        @sw.step(non_split_inputs=["nodes", "edges"])
        def train(model: Any, nodes: Tensor, edges: Tensor) -> Tensor:
            loss = loss_of(model, nodes, edges)
            model.backward(loss)
            return loss

        nodes = batches(0, 1)[0]
        edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
        train(model, nodes, edges)
        loss_of(plain, nodes, edges).backward()
        return apart(plain, model)

    assert run_ranks(job, 2) == [[], []]


def test_an_empty_batch_is_one_error_on_all_ranks():
    """Ranks other than the first ended with an IndexError: they looked for a batch of their own."""

    def job():
        sw, _, model = start(Stack, {})

        @sw.step
        def train(model: Any, x: Tensor) -> Tensor:
            loss = model(x).square().sum()
            model.backward(loss)
            return loss

        x = batches(0, 1)[0]
        train(model, x)
        with pytest.raises(UsageError, match="the batch is empty: x has 0 rows"):
            train(model, x[:0])

    run_ranks(job, 2)
