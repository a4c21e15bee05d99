"""Settings that are given to a call in place of `init`."""

import pytest

from shardwright.config.config import refuse_misplaced
from shardwright.errors import UsageError

SPLITS = ("non_split_inputs", "split_lists")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"microbatches": 4},
            'a setting of the run. Write sw.init({"microbatches": 4}), or shardwright run --set',
        ),
        ({"partitions": 2}, 'Write sw.init({"partitions": 2})'),
        ({"split_list": ["x"]}, "Did you mean split_lists?"),
        ({"microbatchez": 4}, "Did you mean the setting microbatches of sw.init?"),
        ({"colour": 1}, "no option colour: it has non_split_inputs, split_lists."),
    ],
)
def test_the_message_names_the_right_place(given, message):
    with pytest.raises(UsageError) as refused:
        refuse_misplaced("@sw.step", given, takes=SPLITS)
    assert message in str(refused.value)


def test_nothing_is_said_of_nothing():
    refuse_misplaced("@sw.step", {}, takes=SPLITS)
