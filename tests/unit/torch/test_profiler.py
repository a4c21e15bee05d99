"""Times of one unit are put together."""

from shardwright.torch.measure import Timing
from shardwright.torch.profiler import rounds_of, typical


def timing(forward_s, backward_s):
    return Timing(
        forward_s=forward_s,
        backward_s=backward_s,
        input_s=backward_s / 2,
        weight_s=backward_s / 2,
        spread=0.0,
    )


def test_the_medians_of_the_rounds_count():
    found = typical([timing(1.1, 2.1), timing(1.3, 2.0), timing(1.0, 2.4)])
    assert found == timing(1.1, 2.1)


def test_rounds_in_which_the_machine_was_slow_do_not_count():
    slow, fast = timing(1.5, 3.5), timing(1.0, 2.0)
    assert typical([slow, fast, fast]) == typical([fast, slow, fast, slow, fast]) == typical([fast]) == fast


def test_a_model_is_measured_for_as_long_as_a_disturbance_lasts_or_eight_times():
    assert rounds_of(1e-3) == 8
    assert 3 < rounds_of(1.0) < 8
    assert rounds_of(60.0) == 3
