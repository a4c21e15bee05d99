"""Attributes of modules while microbatches take turns."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from shardwright.errors import TraceMismatchError
from shardwright.torch.execution.microbatches.microbatch_state import OwnAttributes
from shardwright.torch.program.program import _read_in
from shardwright.torch.python_state.attribute_use import Access, AttributeUse
from shardwright.torch.tracing.trace_data import SideEffects


def program(
    module, *, reads_first=False, read_in=None, carries=False, recomputes=False, put_back=False
) -> Any:
    accesses = (Access(0, not reads_first, "user.py:1"), Access(1, True, "user.py:2"))
    use = AttributeUse(module, "held", "held of the model", accesses, carries, False, False, put_back)
    known = {} if read_in is None else {(id(module), "held"): read_in}
    trace = SimpleNamespace(effects=SideEffects(attributes=(use,)), recomputes=recomputes)
    return SimpleNamespace(trace=trace, read_in=known)


@pytest.fixture
def module():
    module = nn.Module()
    module.held = "initial"
    return module


def turn(attributes, microbatch, module, value=None):
    """What a microbatch finds; writes a value unless it is None."""
    with attributes.of(microbatch):
        found = module.held
        if value is not None:
            module.held = value
    return found


def test_what_is_written_after_a_later_microbatch_has_read_it_is_refused(module):
    reader = program(module, reads_first=True, read_in=0)
    attributes = OwnAttributes([reader] * 2)
    turn(attributes, 0, module, "zero")
    turn(attributes, 1, module, "one")
    with pytest.raises(TraceMismatchError, match=r"microbatch 0 changes .* microbatch 1 has read it"):
        turn(attributes, 0, module, "late")


def test_what_all_put_back_each_finds_as_the_first_did(module):
    attributes = OwnAttributes([program(module, reads_first=True, read_in=0, put_back=True)] * 2)
    assert turn(attributes, 0, module, "switched") == "initial"
    assert turn(attributes, 1, module, "switched too") == "initial"
    assert turn(attributes, 0, module, "initial") == "switched"
    assert turn(attributes, 1, module, "initial") == "switched too"
    attributes.finish()
    assert module.held == "initial"


def test_one_that_does_not_put_it_back_is_refused(module):
    attributes = OwnAttributes([program(module, reads_first=True, read_in=0, put_back=True)] * 2)
    turn(attributes, 0, module, "switched")
    turn(attributes, 1, module)
    with pytest.raises(TraceMismatchError, match=r"microbatch 0 leaves another value .* held of the model"):
        attributes.finish()


@pytest.mark.parametrize(("before", "turn"), [(2.0, 0), (3.0, 0), (3.5, 1), (7.0, 1), (7.25, 2)])
def test_a_read_directly_before_a_pause_belongs_to_the_turn_that_ends_there(module, before, turn):
    use = AttributeUse(module, "held", "", (Access(before, False, ""),), False, False, False)
    trace: Any = SimpleNamespace(effects=SideEffects(attributes=(use,)))
    assert _read_in(trace, [3, 7]) == {(id(module), "held"): turn}
