"""What microbatches of a LightningModule log."""

from contextvars import copy_context

import pytest

from shardwright.integrations.lightning import log_of_microbatch


def test_an_error_in_a_microbatch_leaves_nothing_behind():
    """Bug: where a microbatch has no context of its own, later logs went to the failed one."""
    with pytest.raises(RuntimeError), log_of_microbatch():
        raise RuntimeError
    assert "logged" not in [variable.name for variable in copy_context()]
