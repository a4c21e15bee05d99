"""The loss scale falls with overflows and grows without."""

import pytest

from shardwright.errors import UsageError
from shardwright.torch.loss_scale import LossScaler


def scales(overflows, **settings):
    scaler = LossScaler(**settings)
    found = []
    for overflow in overflows:
        scaler.gradients_came(overflow=overflow)
        assert scaler.begin_update() is not overflow
        assert scaler.begin_update() is not overflow  # a second optimizer changes nothing
        found.append(scaler.scale)
    return found


def test_it_falls_at_once_and_grows_after_a_window():
    overflows = [True, False, False, True, False, False]
    assert scales(overflows, scale=8.0, scale_window=2) == [4, 4, 8, 4, 4, 8]


def test_several_overflows_until_it_falls():
    assert scales([True, True, True], scale=8.0, delayed_shift=2) == [8, 4, 2]
    forgets = {"scale": 8.0, "delayed_shift": 2, "consecutive_hysteresis": True}
    assert scales([True, False, True, True], **forgets) == [8, 8, 8, 4]
    assert scales([True, False, True], scale=8.0, delayed_shift=2) == [8, 8, 4]


def test_an_overflow_counts_until_the_update_that_its_gradients_are_added_up_for():
    scaler = LossScaler(scale=8.0)
    scaler.gradients_came(overflow=True)
    scaler.gradients_came(overflow=False)
    assert not scaler.begin_update()
    scaler.gradients_came(overflow=False)
    assert scaler.begin_update()


@pytest.mark.parametrize("settings", [{"scale": 0.0}, {"scale_factor": 1.0}, {"min_scale": -1.0}])
def test_scales_that_cannot_work(settings):
    with pytest.raises(UsageError, match="cannot work"):
        LossScaler(**settings)
