"""Errors name what scripts for smp know."""

import pytest
import torch

from shardwright.errors import UsageError, library_named
from shardwright.testing import run_ranks


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
