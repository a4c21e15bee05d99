"""What scripts do around a step gives over two ranks what it gives in one process."""

import numpy as np
import pytest
from keras_features import SCRIPTS, results

from choices import thorough


@pytest.mark.parametrize("legacy", [False, thorough(True)], ids=["keras3", "legacy"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_two_ranks_give_what_one_process_gives(script, legacy):
    expected, found = results(legacy=legacy)
    assert not isinstance(expected[script], str), expected[script]
    figures, predictions, iterations = expected[script]
    for rank in found:
        mine = rank.get(script, "not run")
        assert not isinstance(mine, str), mine
        np.testing.assert_allclose(mine[0], figures, rtol=1e-6)
        np.testing.assert_allclose(mine[1], predictions, rtol=0, atol=1e-6 * np.abs(predictions).max())
        assert mine[2] == iterations
