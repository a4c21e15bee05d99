"""What a trace makes of units that fake tensors cannot get through."""

import copy
import cProfile
import pstats
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import DeferredReadError, TraceError, UsageError
from shardwright.torch.interception.glue import active_handler, intercept_calls, plain_torch
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.tracing.trace import trace_step
from shardwright.torch.tracing.trace_data import Trace

WIDTH = 4


def traced(model: nn.Module, step, *args) -> Trace:
    names = [name for name, _ in model.named_children()]
    unit_map = UnitMap.of(model, names)
    for module in unit_map.modules.values():
        intercept_calls(module)
    return trace_step(unit_map, step, (args, {}))


def shapes(trace: Trace) -> list[tuple[int, ...]]:
    return [trace.graph.values[node.outputs[0]].spec.shape for node in trace.graph.nodes]


class Chooses(nn.Linear):
    """Looks at values: no fake tensor gets through."""

    def forward(self, x):
        return super().forward(x) if x.sum() > -1e9 else x


@pytest.mark.parametrize(
    ("copied", "said"),
    [
        (lambda model, x: model, "a module with a.weight, which only one rank has"),
        (lambda model, x: model["a"](x).detach(), "a tensor that only one rank has"),
    ],
)
def test_deep_copies_between_units(copied, said):
    """The error was that of a tensor that leaves a unit by another way than as its result."""
    model = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})

    def step(x):
        twin = copy.deepcopy(copied(model, x))
        return model["b"](x) + (twin["b"](x) if isinstance(twin, nn.Module) else twin)

    with pytest.raises(TraceError, match=rf"test_trace\.py:\d+: copy\.deepcopy\(\) is given {said}"):
        traced(model, step, torch.ones(2, WIDTH))


class Memory:
    """A cache, as a decoder hands it from layer to layer."""

    def __init__(self):
        self.seen: list[Tensor] = []


class Remembers(Chooses):
    def forward(self, x, memory):
        memory.seen.append(x * 2)  # a tensor that was computed: deepcopy alone refuses it
        return super().forward(x + sum(memory.seen)), memory


def test_a_cache_is_copied_before_the_attempt_that_fails():
    model = nn.ModuleDict({"a": Remembers(WIDTH, WIDTH), "b": Remembers(WIDTH, WIDTH), "c": nn.Linear(4, 2)})

    def step(x):
        memory = Memory()
        x, same = model["a"](x, memory)
        x, same = model["b"](x, same)
        assert same is memory
        assert len(memory.seen) == 2
        return model["c"](x)

    trace = traced(model, step, torch.ones(3, WIDTH))
    assert shapes(trace) == [(3, WIDTH), (3, WIDTH), (3, 2)]


class Gathers(nn.Embedding):
    """As many rows as the largest id says: with zeros in place of the ids there would be none."""

    def forward(self, ids, x):
        top = int(ids.max())
        ids.clamp_(max=1)
        return super().forward(ids)[:, None, :].expand(-1, top, -1) + x[:, :1, None]


def test_free_arguments_are_what_they_are():
    model = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": Gathers(8, WIDTH)})
    ids = torch.tensor([5, 3, 0])

    trace = traced(model, lambda x, ids: model["b"](ids, model["a"](x)), torch.ones(3, WIDTH), ids)
    assert shapes(trace) == [(3, WIDTH), (3, 5, WIDTH)]
    assert ids.tolist() == [5, 3, 0]


def test_a_change_in_place_is_noted_although_fake_tensors_cannot_get_through():
    class Doubles(Chooses):
        def forward(self, x):
            y = super().forward(x)
            x.mul_(2)
            return y

    model = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": Doubles(WIDTH, WIDTH), "c": nn.Linear(4, 2)})

    def step(x):
        x = model["a"](x).clone()
        y = model["b"](x)
        return model["c"](x + y)

    trace = traced(model, step, torch.ones(3, WIDTH))
    assert [len(s.changes) for s in trace.steps if s.func is model["b"]] == [1]


def ctc(model, x, targets, lengths):
    scores = model["a"](x).log_softmax(-1)
    return F.ctc_loss(scores, targets, torch.full((3,), 6), lengths)


def test_an_operation_without_a_fake_kernel_runs_on_random_data():
    model = nn.ModuleDict({"a": nn.Linear(WIDTH, 5)})
    targets, lengths = torch.tensor([[1, 2, 3], [1, 1, 0], [4, 0, 0]]), torch.tensor([3, 2, 1])
    trace = traced(model, lambda *args: ctc(model, *args), torch.ones(6, 3, WIDTH), targets, lengths)
    assert shapes(trace)[-1] == ()
    assert trace.graph.nodes[-1].name == "ctc_loss"
    assert trace.path is not None
    assert trace.path.taken_by([torch.ones(6, 3, WIDTH), targets, torch.tensor([1, 2, 1])])


def test_a_shape_that_follows_from_values_of_the_batch_is_another_path():
    model = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, 2)})

    def step(x, counts):
        return model["b"](torch.repeat_interleave(model["a"](x), counts, dim=0))

    x, counts = torch.ones(3, WIDTH), torch.tensor([2, 0, 3])
    trace = traced(model, step, x, counts)
    assert shapes(trace)[-1] == (5, 2)
    assert trace.path.taken_by([x, torch.tensor([1, 1, 3])])
    assert not trace.path.taken_by([x, torch.tensor([1, 1, 1])])


@pytest.mark.parametrize(
    "operation",
    [
        torch.nonzero,
        torch.unique,
        lambda y: y[y > 0],
        lambda y: F.one_hot(y.argmax(-1)),
        lambda y: y[: y.argmax()],
    ],
)
def test_a_shape_that_follows_from_values_of_one_rank_is_refused(operation):
    model = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH)})
    with pytest.raises(DeferredReadError, match=r"only one rank has|on another rank"):
        traced(model, lambda x: operation(model["a"](x)), torch.ones(3, WIDTH))


class Mean:
    """An object that is a hook."""

    def __call__(self, module, args, output):
        output.mean().item()


def looks_at_its_input(factor, module, args):
    return None if (factor * args[0]).sum() > 0 else args


@pytest.mark.parametrize(
    "register",
    [
        lambda module: module.register_forward_hook(lambda m, i, o: float(o.mean())),
        lambda module: module.register_forward_hook(Mean()),
        lambda module: module.register_forward_pre_hook(partial(looks_at_its_input, 2)),
    ],
)
def test_a_read_in_a_forward_hook_is_refused_with_what_a_hook_can_do(register):
    """The advice was to return the tensor from the step function, which a hook cannot."""
    model = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
    register(model["b"])
    with pytest.raises(DeferredReadError, match=r"only one rank has\. It is read in a forward hook\. Keep"):
        traced(model, lambda x: model["b"](model["a"](x)), torch.ones(3, WIDTH))


def test_the_work_of_a_trace_grows_with_its_length():
    """Each step went through all values made so far: a loop of 4000 operations took 25 seconds."""
    model = nn.ModuleDict({"layer": nn.Linear(WIDTH, WIDTH)})

    def function_calls(num_operations: int) -> int:
        def step(x):
            y = model["layer"](x)
            for _ in range(num_operations):
                y = y + 1
            return y

        with cProfile.Profile() as profile:
            traced(model, step, torch.ones(2, WIDTH))
        return pstats.Stats(profile).total_calls

    function_calls(1)
    few, many = function_calls(50), function_calls(500)
    assert many < 12 * few


def clears(model):
    for parameter in model.parameters():
        parameter.grad = None


def clips_values(model):
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


def clips(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("use", [clips, clips_values, clears, lambda model: model["a"].weight.grad])
def test_gradients_are_not_used_behind_the_backward_of_a_step_function(use):
    """A trace finds none; a later microbatch found those of an earlier one, and went another way."""
    model = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH)})

    def step(x):
        loss, handler = model["a"](x).sum(), active_handler()
        with plain_torch():
            handler.backward(loss, None)
        use(model)

    what = "gradients are clipped" if use in (clips, clips_values) else "the gradient of a parameter is used"
    with pytest.raises(UsageError, match=rf"{what} inside a step function.*behind its call"):
        traced(model, step, torch.ones(3, WIDTH))
