"""The members of ``smp.DistributedModel``, on one, two and four ranks."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import smdistributed.modelparallel.torch as smp
from compat.small_models import FEATURES, QUIET, Net, batch, largest_difference, loss_of, net, plain_gradients
from shardwright.errors import UsageError
from shardwright.testing import run_ranks

CLOSE = 1e-12


def wrapped(settings, **options):
    """The library, a wrapped model, the plain one, and a training step."""
    smp.init({**QUIET, "ddp": True, "microbatches": 2, **settings})
    plain = net()
    model = smp.DistributedModel(plain, **options)

    @smp.step
    def train_step(model, x, y):
        loss = loss_of(model, x, y)
        model.backward(loss)
        return loss

    return smp, model, plain, train_step


def test_the_users_module_is_reached_by_any_number_of_hops():
    def hops():
        smp, model, plain, train_step = wrapped({"partitions": 2})
        for _ in range(2):
            assert model.get_module() is plain
            assert model.module.module is plain
            assert model.module == plain
            assert model.module.head is plain.head
            assert isinstance(model, smp.model.DistributedModel)
            assert isinstance(model.module, Net)
            assert isinstance(model.module, nn.Module)
            assert dict(model.module.named_parameters()).keys() == dict(plain.named_parameters()).keys()
            unwrapped = model
            while hasattr(unwrapped, "module"):  # as transformers' unwrap_model does
                unwrapped = unwrapped.module
            assert unwrapped is plain
            train_step(model, *batch(0))
        model.module.note = "set through the proxy"
        return plain.note, model.partitioned

    assert run_ranks(hops, 2) == [("set through the proxy", True)] * 2


def test_each_rank_has_its_share():
    def share():
        smp, model, plain, train_step = wrapped({"partitions": 2})
        everything = {name for name, _ in plain.named_parameters()}
        modules = {name for name, _ in plain.named_modules()}
        assert not model.partitioned
        assert {name for name, _ in model.local_named_parameters()} == everything
        assert {name for name, _ in model.local_named_modules()} == modules
        train_step(model, *batch(0))
        assert model.partitioned
        assert sum(1 for _ in model.parameters()) == len(everything)
        own = {name for name, _ in model.local_named_parameters()}
        assert len(list(model.local_parameters())) == len(own)
        assert [id(p) for p in model.local_parameters()] == [
            id(p) for _, p in model.default_reducer_named_parameters()
        ]
        assert {name for name, _ in model.virtual_named_parameters()} == own
        own_modules = {name for name, _ in model.local_named_modules()}
        assert len(list(model.local_modules())) == len(own_modules)
        in_modules = {f"{m}.{n}" for m, module in model.local_named_modules() for n in module._parameters}
        assert in_modules == own
        shares = smp.allgather((own, own_modules), smp.MP_GROUP)
        assert set.union(*(s[0] for s in shares)) == everything
        assert set.union(*(s[1] for s in shares)) == modules
        assert set.intersection(*(s[0] for s in shares)) == set.intersection(*(s[1] for s in shares)) == set()
        return list(model.local_buffers()), list(model.local_named_buffers())

    assert run_ranks(share, 2) == [([], [])] * 2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_hooks_run_after_the_partition_and_once_after_a_step(num_ranks):
    def hooked(num_ranks):
        smp, model, _, train_step = wrapped({"partitions": num_ranks})
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        calls = []
        model.register_post_partition_hook(lambda m, o: calls.append(("placed", m is model, o is optimizer)))
        model.register_post_step_hook(lambda mod, opt: calls.append(("step", mod is model, opt is optimizer)))
        model.register_post_step_hook(lambda *_: calls.append("never")).remove()
        for index in range(2):
            train_step(model, *batch(index))
        return calls

    expected = [("placed", True, True), ("step", True, True)]
    assert run_ranks(hooked, num_ranks, num_ranks) == [expected] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_whole_model_comes_to_the_host_of_every_rank(num_ranks):
    def gathered(num_ranks):
        _, model, plain, train_step = wrapped({"partitions": num_ranks})
        x, y = batch(0)
        plain_copy = copy.deepcopy(plain)
        train_step(model, x, y)
        assert model.cpu() is model
        assert torch.equal(model(x), plain_copy(x))
        assert model.state_dict().keys() == plain_copy.state_dict().keys()
        with pytest.raises(UsageError, match="has gathered the model on every rank"):
            train_step(model, x, y)
        return len(list(model.get_module().parameters()))

    assert run_ranks(gathered, num_ranks, num_ranks) == [6] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("calls", ["model.backward", "loss.backward", "both"])
def test_one_stage_may_train_outside_of_steps(num_ranks, calls):
    """With loss.backward() replicas kept gradients of their own, and came apart without a word."""

    def called(calls):
        smp, model, _, _ = wrapped({})
        assert model.partitioned
        for index in range(2):  # gradients add up
            x, y = batch(index, smp.dp_rank())
            loss = loss_of(model, x, y)
            if calls == "model.backward" or (calls == "both" and index):
                model.backward(loss)
            else:
                loss.backward()
        sums = [
            plain_gradients(net(), [batch(index, r) for r in range(smp.dp_size())], microbatches=1)
            for index in range(2)
        ]
        return largest_difference(model, {name: sums[0][name] + sums[1][name] for name in sums[0]})

    assert max(run_ranks(called, num_ranks, calls)) < CLOSE


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_backward_takes_several_tensors_and_their_gradients(num_ranks):
    def backward(num_ranks):
        smp.init({**QUIET, "partitions": num_ranks, "microbatches": 2})
        x, _ = batch(0)
        plain = net()
        model = smp.DistributedModel(copy.deepcopy(plain))

        @smp.step
        def train_step(model, x):
            logits = model(x)
            model.backward([logits, logits.square().mean()], [torch.ones_like(logits), None])

        train_step(model, x)
        for part in x.chunk(2):
            logits = plain(part)
            total = [logits, logits.square().mean()]
            torch.autograd.backward(total, [torch.full_like(logits, 0.5), torch.tensor(0.5, dtype=x.dtype)])
        return largest_difference(model, {name: p.grad for name, p in plain.named_parameters()})

    assert max(run_ranks(backward, num_ranks, num_ranks)) < CLOSE


class Above(nn.Module):
    """A class with a forward of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3)

    def forward(self, x):
        return self.layer(x)


class Below(Above):
    """Calls it by the name that SageMaker's library gave it."""

    def forward(self, x):
        return 2 * super()._orig_forward(x)


def test_the_forward_of_the_class_above_has_its_name():
    def called():
        smp.init({**QUIET})
        plain = Below()
        model = smp.DistributedModel(plain)
        x = torch.ones(2, FEATURES)
        assert not hasattr(nn.Tanh, "_orig_forward")
        return torch.equal(model(x), 2 * plain.layer(x))

    assert run_ranks(called, 1) == [True]


@pytest.mark.parametrize(("num_ranks", "partitions"), [(2, 1), (4, 2)])
def test_a_communication_hook_reduces_over_replicas(num_ranks, partitions):
    def hooked(partitions):
        smp, model, plain, train_step = wrapped({"partitions": partitions}, bucket_cap_mb=0.0001)
        expected = plain_gradients(plain, [batch(0, 0), batch(0, 1)], microbatches=2)
        seen = []

        def hook(group, bucket):
            seen.append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
            assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
            return allreduce_hook(group, bucket)

        model.register_comm_hook(smp.get_dp_process_group(), hook)
        train_step(model, *batch(0, smp.dp_rank()))
        assert sum(number for *_, number in seen) == len(list(model.local_parameters()))
        assert [last for _, last, _ in seen] == [False] * (len(seen) - 1) + [True]
        with pytest.raises(UsageError, match="made a step already"):
            model.register_comm_hook(None, hook)
        return largest_difference(model, expected)

    assert max(run_ranks(hooked, num_ranks, partitions)) < CLOSE


def test_errors_and_warnings_name_the_line_of_the_script():
    """They named lines of the library, which the script had called."""

    def called():
        _, model, _, _ = wrapped({"partitions": 2})

        @smp.step
        def forgets(model, x, y):
            return loss_of(model, x, y)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            forgets(model, *batch(0))
        with pytest.raises(UsageError, match=f"^{__file__}:[0-9]+: the model is spread over ranks"):
            model(batch(0)[0])
        return [(str(w.message).split(" ran ")[0], w.filename == __file__) for w in caught]

    assert run_ranks(called, 2) == [[("forgets()", True)], []]  # the first rank warns


@pytest.mark.parametrize(("num_ranks", "partitions"), [(2, 1), (4, 2)])
def test_replicas_with_other_numbers_of_batches_join(num_ranks, partitions):
    def joined(partitions):
        smp, model, plain, train_step = wrapped({"partitions": partitions})
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        replica = smp.dp_rank()
        expected = copy.deepcopy(plain)
        for index in range(3):  # the second replica has one batch
            batches = [batch(index, r) for r in range(2) if index == 0 or r == 0]
            gradients = plain_gradients(expected, batches, microbatches=2)
            with torch.no_grad():
                for name, parameter in expected.named_parameters():
                    parameter -= 0.1 * gradients[name] * len(batches) / 2
        with model.join():
            for index in range(1 if replica else 3):
                optimizer.zero_grad()
                train_step(model, *batch(index, replica))
                optimizer.step()
        state = model.state_dict()
        return max(float((state[n] - p.detach()).abs().max()) for n, p in expected.named_parameters())

    assert max(run_ranks(joined, num_ranks, partitions)) < CLOSE


def test_wrong_options_are_refused():
    def refused():
        smp.init({**QUIET})
        with pytest.raises(UsageError, match='it is "gpu" or "cpu"'):
            smp.DistributedModel(net(), trace_device="tpu")
        with pytest.raises(UsageError, match="backward_passes_per_step is 0"):
            smp.DistributedModel(net(), backward_passes_per_step=0)
        smp.DistributedModel(net(), "cpu", True, False, 4, True, 25, True, True, True, True)
        with pytest.raises(UsageError, match="a model is wrapped already"):
            smp.DistributedModel(net())
        return True

    assert run_ranks(refused, 1) == [True]


@pytest.mark.parametrize("threshold", [1, 20, 10**6])
def test_parts_of_parameters_are_together_the_whole(threshold):
    def parts(threshold):
        smp.init(
            {
                **QUIET,
                "ddp": True,
                "sharded_data_parallel_degree": 2,
                "sdp_param_persistence_threshold": threshold,
            }
        )
        plain = net()
        model = smp.DistributedModel(plain)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        parameters = list(model.parameters())
        sizes = [p.ds_tensor.ds_numel for p in parameters]
        (flat,) = optimizer.fp32_partitioned_groups_flat
        assert flat.numel() == sum(sizes)

        @smp.step
        def train_step(model, x, y):
            model.backward(loss_of(model, x, y))

        for index in range(2):
            train_step(model, *batch(index, smp.dp_rank()))
            optimizer.step()
            whole = model.state_dict()
            for name, p in plain.named_parameters():
                assert (p.ds_shape, p.ds_numel) == (whole[name].shape, whole[name].numel())
                square = p.ds_tensor.data.square().sum()
                size = torch.tensor([p.ds_tensor.data.numel()])
                assert size.item() == p.ds_tensor.ds_numel
                assert p.ds_tensor.shape == (p.ds_tensor.ds_numel,)
                assert torch.equal(p.ds_tensor.float().norm() ** 2, p.ds_tensor.data.float().norm() ** 2)
                dist.all_reduce(square, group=optimizer.ds_param_shard_group)
                dist.all_reduce(size, group=optimizer.ds_param_shard_group)
                assert size.item() == p.ds_numel
                assert torch.allclose(square, whole[name].square().sum())
            total = flat.square().sum()
            dist.all_reduce(total, group=optimizer.ds_param_shard_group)
            expected = sum(value.square().sum() for value in whole.values())
            assert abs(float(total - expected)) < 1e-4
        assert [p.ds_id for p in parameters] == list(range(6))
        assert optimizer.fp16_groups == [parameters]
        return True

    assert run_ranks(parts, 2, threshold) == [True] * 2


def test_large_gradients_in_float16_are_averaged_outside_of_steps():
    """Their sum is beyond 65504, where float16 ends."""

    def run():
        smp.init({"ddp": True, "partitions": 1, "microbatches": 1, "run_dir": "off"})
        model = smp.DistributedModel(torch.nn.Linear(4, 4, bias=False).half())
        (model(torch.ones(1, 4, dtype=torch.float16)).sum() * 40000).backward()
        return next(model.parameters()).grad.unique().tolist()

    assert run_ranks(run, 2) == [[40000.0]] * 2
