"""What a step function returns behind the end of its program."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright.torch.execution.microbatches.program_end import ProgramEnd

LOSS = torch.ones(())


@pytest.mark.parametrize(("loss", "at"), [(LOSS, 1), (None, None)])
def test_a_none_that_is_returned_is_no_loss(loss, at):
    """It counted as one where no backward was called, so that the losses of the batch were [None]."""
    none_known: Any = SimpleNamespace(value_of=lambda item: None, returned=lambda item: item)
    nothing: Any = None
    end = ProgramEnd(nothing, nothing, nothing, none_known, nothing)
    returned = end.returned({"aside": None, "loss": LOSS}, loss, trains=loss is not None)
    assert returned.loss_at == at
