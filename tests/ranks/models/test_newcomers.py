"""What people do who know DistributedDataParallel: each mistake is an error at once."""

import copy
import functools
import itertools
import pickle
import re
import time

import pytest
import torch
import torch.distributed as dist
from stacks import train as squares
from torch import nn
from torch.nn.utils import clip_grad_norm_

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.testing import RanksFailedError, run_ranks
from shardwright.torch.optimizer.refused_optimizers import refuse_foreign_parameters

QUIET = {"run_dir": "off", "profile": "estimated", "microbatches": 2, "timeout_s": 30}


def four_layers():
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)))


class Script:
    """An ordinary script, up to its loop: one step was made, so that every rank has its part."""

    def __init__(self, module=None, *, first_step=True, settings=None):
        sw.init({**QUIET, **(settings or {})})
        torch.manual_seed(0)
        self.sw, self.x = sw, torch.ones(4, 4)
        self.model = sw.DistributedModel(module or four_layers())
        train = sw.step(squares)

        @sw.step
        def evaluate(model, x):
            return model(x).square().mean()

        self.train, self.evaluate = train, evaluate
        if first_step:
            train(self.model, self.x)


def fails(job, *args, num_ranks=2):
    """What the ranks say, and that they say it soon."""
    started = time.monotonic()
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(job, num_ranks, *args)
    assert time.monotonic() - started < 20  # and not after the timeout of 30 s
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("state_dict", r"calls model\.state_dict\(\), and this rank does not|model\.state_dict\(\) is to be"),
        ("barrier", r"calls sw\.barrier\(\), and this rank does not|sw\.barrier\(\) is to be"),
        ("clip", r"The ranks are at different places of the script"),
    ],
)
def test_a_collective_call_on_one_rank_alone_is_noticed_by_the_next_step(what, message):
    """Both ranks waited until the timeout."""

    def job(rank, what):
        script = Script()
        calls = {
            "state_dict": script.model.state_dict,
            "barrier": script.sw.barrier,
            "clip": lambda: clip_grad_norm_(script.model.parameters(), 1.0),
        }
        if script.sw.rank() == 1:
            calls[what]()
        script.train(script.model, script.x)

    text = fails(job, 1, what)
    assert re.search(message, text)
    assert "not under `if sw.rank() == 0:`" in text


@pytest.mark.thorough
def test_between_hosts_it_is_noticed_after_the_timeout_that_is_set():
    """Groups of a pipeline had PyTorch's timeout, half an hour."""

    def job():
        QUIET.update(shared_memory=False, timeout_s=2)
        script = Script()
        if script.sw.rank() == 0:
            clip_grad_norm_(script.model.parameters(), 1.0)
        script.train(script.model, script.x)

    assert "Timed out waiting 2000ms" in fails(job)


@pytest.mark.parametrize("first_step", [True, False])
def test_one_rank_with_another_dtype(first_step):
    """In the first step both ranks waited until the timeout."""

    def job(first_step):
        script = Script(first_step=first_step)
        if script.sw.rank() == 1:
            script.model.double()
        script.train(script.model, script.x)

    assert "rank 1 begins the step with another requires_grad or dtype of parameters" in fails(
        job, first_step
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_optimizer_of_another_model_or_of_a_copy(num_ranks, when):
    """It lost all of its parameters, and trained nothing."""

    def job(when):
        sw.init(QUIET)
        module = four_layers()
        if when == "before":
            sw.DistributedOptimizer(torch.optim.SGD(copy.deepcopy(module).parameters(), lr=0.1))
        sw.DistributedModel(module)
        sw.DistributedOptimizer(torch.optim.SGD(copy.deepcopy(module).parameters(), lr=0.1))

    text = fails(job, when, num_ranks=num_ranks)
    assert "the optimizer has 8 parameters, and the wrapped model has none of them" in text


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_part_of_an_update_is_made_inside_a_step_function(num_ranks):
    """A scheduler stepped once for each microbatch and trace, silently."""

    def job():
        script = Script(first_step=False)
        optimizer = torch.optim.SGD(script.model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=False)

        class Warmup(torch.optim.lr_scheduler.LRScheduler):
            def get_lr(self):
                return [0.1]

        warmup, plateau = Warmup(optimizer), torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        calls = {
            "scheduler.step": lambda: warmup.step(),
            "scheduler.step ": lambda: plateau.step(1.0),
            "scaler.step": lambda: scaler.step(optimizer),
            "scaler.update": lambda: scaler.update(),
            "scaler.unscale_": lambda: scaler.unscale_(optimizer),
            "optimizer.zero_grad": lambda: optimizer.zero_grad(),
            "model.zero_grad": lambda: script.model.zero_grad(),
        }
        said = []
        for call in (*calls.values(), optimizer.step):

            @script.sw.step
            def train(model, x, call=call):
                loss = model(x).square().mean()
                model.backward(loss)
                call()

            with pytest.raises(UsageError) as caught:
                train(script.model, script.x)
            said.append(str(caught.value))
        return [*calls, "optimizer.step"], said

    names, said = run_ranks(job, num_ranks)[0]
    for name, text in zip(names, said, strict=True):
        assert f"{name.strip()}() is called inside a step function" in text


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(7)
        yield from (torch.randn(4, generator=generator) for _ in range(64))


class Divided(Stream):
    def __iter__(self):
        return itertools.islice(super().__iter__(), sw.rdp_rank(), None, sw.rdp_size())


def test_a_stream_that_replicas_read_whole_is_refused_before_the_first_update():
    """A line told it after the second step; with dropout, nothing did."""

    def job(kind):
        sw.init({**QUIET, "pipeline_parallel_degree": 1})
        torch.manual_seed(sw.rank())
        model = sw.DistributedModel(nn.Sequential(four_layers(), nn.Dropout()))
        train = sw.step(squares)
        for x in torch.utils.data.DataLoader(kind(), batch_size=8):
            train(model, x)

    run_ranks(job, 2, Divided)
    text = fails(job, Stream)
    assert "all 2 replicas have the same samples in step 1: the data set of the loader is an Iterable" in text


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = four_layers()

    def forward(self, x):
        return self.layers(x)


class Proxies(nn.Module):
    """A loss with weights, such as the classes of ArcFace."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, z, y):
        return nn.functional.cross_entropy(z @ self.weight.t(), y)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_loss_with_weights_trains_as_a_part_of_the_model(stages):
    """The advice was an optimizer of its own: each rank trained a copy, or none."""

    def job():
        sw.init({**QUIET, "pipeline_parallel_degree": stages})
        torch.manual_seed(0)
        net, loss = Embedding().double(), Proxies().double()
        with pytest.raises(UsageError, match=r"net.loss = loss_module, before sw.DistributedModel"):
            refuse_foreign_parameters([*net.parameters(), *loss.parameters()], net.parameters())
        net.loss = loss
        plain = copy.deepcopy(net)
        model = sw.DistributedModel(net)
        optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        @sw.step
        def train(model, x, y):
            model.backward(loss(model(x), y))

        xs, ys = torch.randn(2, 4, 4).double(), torch.tensor([[0, 1, 2, 1], [2, 2, 0, 1]])
        for _ in range(2):
            optimizer.zero_grad()
            train(model, xs[sw.dp_rank()], ys[sw.dp_rank()])
            optimizer.step()
            plain.zero_grad()
            losses = [plain.loss(plain(x), y) for x, y in zip(xs[: sw.dp_size()], ys, strict=False)]
            torch.stack(losses).mean().backward()
            with torch.no_grad():
                for p in plain.parameters():
                    p.sub_(p.grad, alpha=0.1)
        state = model.state_dict()
        return max(float((state[name] - own).abs().max()) for name, own in plain.state_dict().items())

    assert run_ranks(job, 2) == pytest.approx([0.0, 0.0], abs=1e-12)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("clip", "gradients are clipped inside a step function"),
        ("clamp", "the gradient of a parameter is used inside a step function"),
        ("rate", "lr of a parameter group of the optimizer is changed inside a step function"),
    ],
)
@pytest.mark.parametrize("stages", [2, 1])
def test_gradients_and_rates_inside_a_step_function(stages, what, said):
    """Of replicas gradients were None there, so nothing was clipped; a rate was halved by each microbatch."""

    def job():
        script = Script(first_step=False, settings={"pipeline_parallel_degree": stages, "microbatches": 2})
        optimizer = script.sw.DistributedOptimizer(torch.optim.SGD(script.model.parameters(), lr=0.1))

        @script.sw.step
        def train(model, x):
            loss = model(x).square().mean()
            model.backward(loss)
            if what == "clip":
                clip_grad_norm_(model.parameters(), 1.0)
            elif what == "clamp":
                [p.grad.clamp_(-1, 1) for p in model.parameters() if p.grad is not None]
            else:
                optimizer.param_groups[0]["lr"] *= 0.5
            return loss

        train(script.model, script.x + script.sw.rank())

    assert said in fails(job)


def test_a_model_that_is_where_it_should_be_may_be_moved_there_after_training():
    """``model.eval().cpu()`` before saving raised an error about meta tensors; shards cannot be cast."""

    def job():
        script = Script()
        model = script.model
        for same in (model.eval().cpu(), model.to("cpu"), model.float(), model.to(torch.device("cpu"))):
            assert same is model
        with pytest.raises(UsageError, match=r"load model.state_dict.., called on all ranks, into a mod"):
            model.to("meta")
        with pytest.raises(UsageError, match=r"memory format \(channels_last\) before the model is wrapped"):
            model.to(memory_format=torch.channels_last)  # was left undone without a word
        script.train(model.train(), script.x)
        return len(model.state_dict())

    assert run_ranks(job, 2) == [8, 8]


def test_a_module_with_the_weights_of_one_rank_is_not_pickled():
    """PyTorch's error was about a lambda."""

    def job():
        script = Script()
        copy.deepcopy(script.model.module)
        with pytest.raises(UsageError, match=r"Save model.state_dict.., called on all ranks"):
            pickle.dumps(script.model.module)

    run_ranks(job, 2)


def test_one_model_after_another():
    """Folds of a cross-validation: the advice was to put all models into one."""

    def job():
        script = Script()
        with pytest.raises(UsageError, match=r"folds, trials.*sw.shutdown\(\) and sw.init"):
            script.sw.DistributedModel(four_layers())
        first = script.train(script.model, script.x).reduce_mean().item()
        script.sw.shutdown()
        again = Script()
        return first, again.train(again.model, again.x).reduce_mean().item()

    for first, again in run_ranks(job, 2):
        assert first == again


def test_the_part_of_a_rank_is_not_saved_as_if_it_were_the_model():
    """``model.module.state_dict()``, as for DistributedDataParallel, had tensors without data."""

    def job():
        script = Script()
        whole = script.model.state_dict()
        script.model.load_state_dict(whole)
        said = []
        for attempt in (script.model.module.state_dict, lambda: pickle.dumps(script.model)):
            try:
                attempt()
            except RuntimeError as error:
                said.append(str(error))
        return said

    for part, pickled in run_ranks(job, 2):
        assert "has the weights of this rank only" in part
        assert "Call model.state_dict() of the DistributedModel, on all ranks" in part
        assert "cannot be pickled or copied" in pickled


def test_names_are_those_of_the_model():
    """Behind "module.", groups that a script makes by name (learning rates by layer) were other ones."""

    def job():
        script = Script(nn.Sequential(*four_layers(), nn.BatchNorm1d(4)), first_step=False)
        model, module = script.model, script.model.module
        assert dict(model.named_parameters()) == dict(module.named_parameters())
        assert [name for name, _ in model.named_buffers()] == [name for name, _ in module.named_buffers()]
        names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
        assert model.state_dict().keys() == set(names)
        assert all(model.get_submodule(name) is each for name, each in model.named_modules())
        assert model.get_parameter("0.0.weight") is module[0][0].weight

    run_ranks(job, 1)


def test_replicas_of_pytorch_around_the_model():
    """A replica failed in the first step for another reason."""

    def job():
        script = Script(first_step=False)
        replica = nn.parallel.DistributedDataParallel(four_layers())
        script.sw.shutdown()
        script.sw.init(QUIET)
        words = "the model cannot be pipelined: it is a torch.nn.parallel.Distrib"
        with pytest.raises(RuntimeError, match=words):
            script.sw.DistributedModel(replica)
        script.sw.DistributedModel(four_layers())
        dist.barrier()

    run_ranks(job, 2)


def test_shapes_that_do_not_fit_are_told_once_and_without_pytorchs_log():
    def job():
        script = Script(nn.Sequential(*four_layers(), nn.Linear(5, 4)), first_step=False)
        script.train(script.model, script.x)

    text = fails(job)
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in text
    assert "in 4 (Linear)" in text
    assert "failed while attempting to run meta" not in text


def test_placement_by_hand_that_nobody_heeds():
    def job():
        sw.init(QUIET)
        with pytest.warns(UserWarning, match="auto_partition is true") as first:
            sw.set_partition(nn.Linear(4, 4), 0)
        with pytest.warns(UserWarning, match="auto_partition is true") as second, sw.partition(0):
            pass
        return [warning.filename for warning in (*first, *second)]

    assert [path.rpartition("/")[2] for path in run_ranks(job, 1)[0]] == ["test_newcomers.py"] * 2


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [("class", r"Make one of the class: DistributedModel\(Linear"), ("state", "model.load_state_dict")],
)
def test_what_is_no_model(kind, remedy):
    from shardwright.torch.model.spread_module import accepted

    with pytest.raises(UsageError, match=remedy):
        accepted(nn.Linear if kind == "class" else nn.Linear(1, 1).state_dict(), None)


def test_step_functions_that_return_before_they_have_run():
    async def asynchronous(x):
        return x

    def generator(x):
        yield x

    for function in (asynchronous, generator):
        with pytest.raises(RuntimeError, match=r"is a generator or asynchronous"):
            sw.step(function)


@pytest.mark.parametrize("loader", [[], [1]], ids=["empty", "one batch"])
def test_a_script_that_calls_no_step_function_says_so(loader, capfd):
    """It ended with exit code 0, and said nothing."""

    def job(loader):
        script = Script(first_step=False)
        script.sw.DistributedOptimizer(torch.optim.SGD(script.model.parameters(), lr=0.1))
        for _ in loader:
            script.evaluate(script.model.eval(), script.x)
        script.sw.shutdown()

    run_ranks(job, 1, loader)
    said = capfd.readouterr().err
    assert ("has called no step function: its loop had no batch" in said) is (not loader)


def with_a_scale(function):
    """A decorator that gives an argument itself: what it makes takes fewer than the function does."""

    @functools.wraps(function)
    def made(model, x):
        return function(0.5, model, x)

    return made


def test_arguments_that_a_step_function_does_not_take():
    """The error came from far inside of the trace."""

    def job():
        script = Script(first_step=False)
        with pytest.raises(RuntimeError, match=r"train\(model, x\) does not take these arguments: missing"):
            script.train(script.x)

        @script.sw.step
        @with_a_scale
        def scaled(scale, model, x):
            loss = model(x).square().mean() * scale
            model.backward(loss)
            return loss

        scaled(script.model, script.x)

    run_ranks(job, 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda parameters: torch.optim.AdamW, "not the class AdamW"),
        (lambda parameters: parameters, "not generator"),
    ],
    ids=["class", "parameters"],
)
def test_what_is_no_optimizer(make, words):
    """It was refused for its option lr."""
    with pytest.raises(RuntimeError, match=f"wraps a torch.optim.Optimizer, {words}. Pass for example"):
        sw.DistributedOptimizer(make(nn.Linear(1, 1).parameters()), lr=0.1)


def test_a_state_inside_a_step_function():
    """Stages came to it in other microbatches, and waited for each other until `timeout_s`."""

    def job():
        script = Script(settings={"pipeline_parallel_degree": 2, "microbatches": 2})

        @script.sw.step
        def train(model, x):
            model.backward(model(x).square().mean())
            return model.state_dict()

        train(script.model, script.x)

    assert "model.state_dict() is called inside a step function" in fails(job)
