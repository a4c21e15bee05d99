"""What a hurried person does wrong: each mistake is a clear error before the first step."""

import json
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright.torch as sw
from shardwright.errors import PeerLostError, PlanError
from shardwright.testing import RanksFailedError, run_ranks, run_ranks_outcomes

QUIET = {"run_dir": "off", "profile": "estimated"}


def four_layers():
    """Four layers of one kind."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


def train_once(config, make_model=None, batch=8, loss_of=None):
    """One training step of a small model on each rank."""
    sw.init({**QUIET, **config})
    torch.manual_seed(0)
    model = sw.DistributedModel((make_model or four_layers)())

    @sw.step
    def train(model, x):
        loss = loss_of(model, x) if loss_of else model(x).square().mean()
        model.backward(loss)
        return loss

    return train(model, torch.ones(batch, 4)).reduce_mean().item()


def refused(num_ranks, *args, **kwargs):
    """The message with which every rank refuses, shown once."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(train_once, num_ranks, *args, **kwargs)
    return str(caught.value)


def test_more_stages_than_units():
    text = refused(2, {"microbatches": 2, "pipeline": "interleaved_1f1b", "virtual_stages": 4})
    assert "PlanError" in text
    assert "4 units" in text or "units" in text


def test_more_microbatches_than_samples():
    text = refused(2, {"microbatches": 16})
    assert "microbatches is 16" in text
    assert "8" in text


def one_layer():
    return nn.Linear(4, 4)


def test_a_model_of_one_layer():
    """The advice was to start one rank, where replicas train it on all."""
    with pytest.raises(
        RanksFailedError, match=r"one layer cannot be cut.*\{\"pipeline_parallel_degree\": 1\}"
    ):
        run_ranks(train_once, 2, {}, one_layer)
    assert run_ranks(train_once, 2, {"pipeline_parallel_degree": 1}, one_layer)


def test_a_sparse_tensor_in_the_batch():
    """What came was "unsupported memory format option Contiguous"."""

    def train_with_matrix():
        sw.init({**QUIET, "microbatches": 2})
        model = sw.DistributedModel(four_layers())

        @sw.step(non_split_inputs=["matrix"])
        def train(model, x, matrix):
            loss = torch.sparse.mm(matrix, model(x)).square().mean()
            model.backward(loss)
            return loss

        train(model, torch.ones(8, 4), torch.eye(4).to_sparse())

    with pytest.raises(
        RanksFailedError,
        match=r"of shape \(4, 4\) .* torch.sparse_coo.*adj.to_dense\(\).* build it in the step",
    ):
        run_ranks(train_with_matrix, 2)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (1, 2)])
def test_a_packed_sequence_in_the_batch(stages, microbatches):
    """The other rank took what it was sent for a stranger's; replicas said that x has 3 rows, but x has 5."""

    def job():
        sw.init({**QUIET, "microbatches": microbatches, "pipeline_parallel_degree": stages})
        model = sw.DistributedModel(four_layers())

        @sw.step
        def train(model, x):
            model.backward(model(x.data).square().mean())

        train(model, nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)]))

    with pytest.raises(
        RanksFailedError, match="a PackedSequence, whose rows belong to no sample: it is neither"
    ):
        run_ranks(job, 2)


def test_reading_between_layers_names_the_line_and_the_remedy():
    """Nobody could know what the stages have to do behind it. Behind the last layer, values may be read."""

    def loss_of(model, x):
        loss = model(x).square().mean()
        if loss.item() > 0:
            loss = model(x * loss).square().mean()
        return loss

    text = refused(2, {"microbatches": 2}, loss_of=loss_of)
    assert "test_bad_input.py" in text
    assert "the model is called again behind a value that the step function has read" in text
    assert "Call the model first, and read values then" in text


class _Chooses(nn.Module):
    """Goes by a value between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        first, *others = self.layers
        x = first(x)
        if x.norm() > 0.1:
            x = x / 2
        for layer in others:
            x = layer(x).tanh()
        return x


def test_a_condition_before_layers_goes_into_a_module_inside():
    text = refused(2, {"microbatches": 2, "pipeline_parallel_degree": 2}, make_model=_Chooses)
    assert "test_bad_input.py" in text
    assert "put that and the layers behind it into a module inside" in text

    def make():
        return nn.Sequential(_Chooses(), nn.Linear(4, 4), nn.Linear(4, 4))

    torch.manual_seed(0)
    expected = make()(torch.ones(4, 4)).square().mean().item()
    found = run_ranks(train_once, 2, {"microbatches": 1, "pipeline_parallel_degree": 2}, make, batch=4)
    assert found == pytest.approx([expected, expected])


def test_ranks_with_different_versions_of_the_library():
    def start():
        import shardwright

        if dist.get_rank() == 1:
            shardwright.__version__ = "0.0.9"
        sw.init(QUIET)

    with pytest.raises(RanksFailedError) as caught:
        run_ranks(start, 3)
    assert "LaunchError: the ranks run different versions: ranks 0, 2 have shardwright 0.1.0" in str(
        caught.value
    )
    assert "; rank 1 has shardwright 0.0.9" in str(caught.value)
    assert "pip install shardwright==" in str(caught.value)


def test_a_loss_that_does_not_depend_on_the_model():
    text = refused(2, {"microbatches": 2}, loss_of=lambda model, x: (model(x).detach() * 0).mean())
    assert "the loss does not depend on any trained parameter" in text


def test_a_step_before_init():
    @sw.step
    def train(x):
        return x

    with pytest.raises(RuntimeError, match=r"Call shardwright\.torch\.init\(\) first"):
        train(torch.ones(2))


def plan_of_a_run(folder):
    """A plan file, as a run writes it."""

    def job(folder):
        sw.init({"profile": "estimated", "microbatches": 2, "run_dir": str(folder), "run_name": "made"})
        model = sw.DistributedModel(four_layers())

        @sw.step
        def train(model, x):
            loss = model(x).mean()
            model.backward(loss)
            return loss

        train(model, torch.ones(4, 4))

    run_ranks(job, 2, folder)
    return folder / "made" / "plan.json"


def follow(path, make_model=None):
    """Runs with a plan file."""
    return train_once({"plan": str(path)}, make_model=make_model)


def test_a_plan_file_reproduces_the_run_and_a_stale_one_is_refused(tmp_path):
    path = plan_of_a_run(tmp_path)
    assert len(run_ranks(follow, 2, path)) == 2

    with pytest.raises(RanksFailedError) as caught:
        run_ranks(follow, 2, path, make_model=lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))))
    assert "StalePlanError" in str(caught.value)
    assert "80 parameters, but this one has" in str(caught.value)

    with pytest.raises(RanksFailedError) as caught:
        run_ranks(follow, 2, path, make_model=lambda: nn.Sequential(*four_layers()[:1], nn.Flatten()))
    assert "StalePlanError" in str(caught.value)
    assert "2 of its 4 units are no modules of this one, for example 2" in str(caught.value)

    with pytest.raises(RanksFailedError, match=r"the plan is for .* = 2 ranks, but 3 are running"):
        run_ranks(follow, 3, path)

    with pytest.raises(RanksFailedError, match="the plan decides otherwise") as caught:
        # a warning, which tests take for an error
        run_ranks(train_once, 2, {"plan": str(path), "microbatches": 4, "virtual_stages": 3})
    assert "microbatches is 4, but the plan has 2." in str(caught.value)
    assert "virtual_stages is 3, but the plan has 1." in str(caught.value)

    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(PlanError, match="is no JSON"):
        follow(path)

    path.write_text(json.dumps({**json.loads(whole), "plan_version": 99}))
    with pytest.raises(PlanError, match="plan_version 99"):
        follow(path)


def test_a_rank_that_dies_in_mid_step_is_named_and_the_others_stop_within_seconds():
    class Fatal(nn.Linear):
        calls = 0

        def forward(self, x):
            if type(x) is torch.Tensor:
                Fatal.calls += 1
                if Fatal.calls == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(x)

    def make_model():
        return nn.Sequential(nn.Linear(4, 4), Fatal(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))

    started = time.monotonic()
    outcomes = run_ranks_outcomes(
        train_once, 4, {"microbatches": 4, "pipeline": "1f1b"}, make_model=make_model, timeout_s=60
    )
    assert time.monotonic() - started < 20
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2, 3):
        assert PeerLostError.__name__ in outcomes[rank].error
        assert "rank 1 failed first" in outcomes[rank].error
