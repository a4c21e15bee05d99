"""What is left to the sweep is seen in pairs all the same."""

from itertools import combinations, product

import pytest

from choices import chosen, some_combinations


@pytest.mark.parametrize(
    ("sizes", "together", "most"),
    [((5, 2), 1, 5), ((2, 4, 2), 2, 8), ((2, 2, 2), 2, 4), ((3, 3, 3), 2, 12)],
)
def test_each_choice_of_values_is_seen(sizes, together, most):
    found = chosen(sizes, together)
    for which in combinations(range(len(sizes)), together):
        seen = {tuple(places[i] for i in which) for places in found}
        assert seen == set(product(*(range(sizes[i]) for i in which)))
    assert len(found) == len(set(found)) <= most


def test_the_others_are_left_to_the_sweep():
    parameters = some_combinations("abc", (1, 2))
    assert [parameter.values for parameter in parameters] == list(product("abc", (1, 2)))
    everywhere = [parameter.values for parameter in parameters if not parameter.marks]
    assert len(everywhere) == 3
    assert {letter for letter, _ in everywhere} == set("abc")
    assert {number for _, number in everywhere} == {1, 2}
