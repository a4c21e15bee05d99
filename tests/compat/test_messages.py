"""Errors name what scripts for smp know."""

import pytest
import torch

from shardwright.errors import ShardwrightError, UsageError, library_named
from shardwright.exit_codes import exit_code_of
from shardwright.launch.processes import WorkerExit
from shardwright.launch.ranks.verdict import exit_code
from shardwright.testing import run_ranks
from smdistributed.modelparallel.torch import exceptions


def test_the_library_has_the_name_that_the_script_gives_it() -> None:
    error = UsageError("decorate it with @sw.step, not under `if sw.rank() == 0:`; sw.Checkpoints saves")
    with library_named("smp"):
        assert str(error) == (
            "decorate it with @smp.step, not under `if smp.rank() == 0:`; sw.Checkpoints saves"
        )
    assert str(error).startswith("decorate it with @sw.step")


def test_errors_of_a_run_name_smp() -> None:
    def run() -> None:
        import smdistributed.modelparallel.torch as smp

        smp.init({"partitions": 1, "run_dir": "off"})
        step = smp.step(lambda model, x: model(x))
        with pytest.raises(UsageError, match=r"Call smp\.DistributedModel\(model\) before the first step"):
            step(None, torch.ones(2))
        smp.shutdown()
        assert str(UsageError("sw.step")) == "sw.step"

    run_ranks(run, 1)


def test_a_backward_of_what_a_step_has_returned_says_where_it_belongs() -> None:
    """It was PyTorch's "element 0 of tensors does not require grad"."""

    def run() -> None:
        import smdistributed.modelparallel.torch as smp

        original = torch.autograd.backward
        smp.init({"partitions": 1, "run_dir": "off"})
        model = smp.DistributedModel(torch.nn.Linear(2, 1)).eval()
        loss = smp.step(lambda model, x: model(x).mean())(model, torch.ones(2, 2)).reduce_mean()
        with pytest.raises(UsageError, match=r"for reading, reduce_mean\(\) too.*decorated with @smp\.step"):
            (loss / 2).backward()
        weight = torch.ones((), requires_grad=True)
        (2 * weight).backward()  # of another model
        assert weight.grad == 2
        smp.shutdown()
        assert torch.autograd.backward is original

    run_ranks(run, 1)


@pytest.mark.parametrize("name", exceptions.__all__)
def test_a_run_ends_with_the_code_of_an_error_wherever_it_is_defined(name: str) -> None:
    """`NotInitializedError`, which is no error of `shardwright.errors` itself, ended runs with 5."""
    kind = getattr(exceptions, name)
    text = f"Traceback (most recent call last):\n  File 'train.py', line 3\n{kind.__module__}.{name}: text"
    ended = WorkerExit(rank=0, local_rank=0, life=0, exit_code=1, at_s=9.0, seconds=4.0, error=text, log="")
    expected = 5 if kind is ShardwrightError else exit_code_of(kind)
    assert exit_code([ended]) == expected
