"""Times of one unit are put together."""

from shardwright.torch.measure import Timing
from shardwright.torch.profiler import undisturbed


def timing(forward_s, backward_s):
    return Timing(
        forward_s=forward_s,
        backward_s=backward_s,
        input_s=backward_s / 2,
        weight_s=backward_s / 2,
        spread=0.0,
    )


def test_the_two_fastest_rounds_are_averaged():
    found = undisturbed([timing(1.1, 2.1), timing(1.3, 2.4), timing(1.0, 2.0)])
    assert found == timing(1.05, 2.05)


def test_rounds_in_which_the_machine_was_slow_do_not_count():
    slow, fast = timing(1.5, 3.5), timing(1.0, 2.0)
    assert undisturbed([slow, fast, slow]) == undisturbed([fast, slow]) == undisturbed([fast]) == fast
