"""Signals that ask a run to save and end."""

import signal

import pytest

from shardwright.torch.checkpoints.saves import SaveSignals


@pytest.mark.parametrize("says", [True, False])
def test_one_rank_answers_ctrl_c(capfd, says):
    """A terminal sends it to all ranks: there was a line of each."""
    signals = SaveSignals(["SIGINT"], says=says)
    try:
        signal.raise_signal(signal.SIGINT)
        assert signals.came == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signals.close()
    assert capfd.readouterr().err == says * "saving at the end of this step; Ctrl-C again ends at once\n"
