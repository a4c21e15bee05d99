"""Placements that a module's author has pinned: they fit, go with copies, and are no matter of the search."""

import copy

import pytest
import torch
from torch import nn

from shardwright.errors import UsageError
from shardwright.placement import WHOLE, Cut
from shardwright.torch.tensor_parallel.search import Unit, find_placements
from shardwright.torch.units.tensor_division import Pin, pin, pin_whole, pinned_placements


def two_layers():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


@pytest.mark.parametrize(
    ("where", "num_ranks", "expected"),
    [
        (Pin(0), 2, "cut 0 (r0:6 r1:6)"),
        (Pin(1), 3, "cut 1 (r0:2 r1:3 r2:3)"),
        (Pin(0, block=4), 2, "cut 0 (r0:4 r1:8)"),
        (Pin(0, block=4), 4, "whole"),  # three blocks
        (Pin(None), 2, "whole"),
    ],
)
def test_a_pin_is_a_cut_for_any_number_of_ranks(where, num_ranks, expected):
    assert str(where.placement((12, 8), num_ranks=num_ranks)) == expected


def test_pins_are_found_under_all_names_of_a_parameter():
    model = nn.ModuleDict({"table": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    model["head"].weight = model["table"].weight
    pin_whole(model["table"])
    pin(model["head"], "weight", Pin(0))
    cut = Cut.even(0, 10, num_ranks=2)
    for each in (model, copy.deepcopy(model)):
        assert pinned_placements(each, num_ranks=2) == {"table.weight": cut, "head.weight": cut}
    pin(model["table"], "weight", Pin(1))
    with pytest.raises(UsageError, match=r"table\.weight and head\.weight are one parameter, but are"):
        pinned_placements(model, num_ranks=2)


@pytest.mark.parametrize("where", [Pin(2), Pin(0, block=5)])
def test_a_pin_that_does_not_fit_is_refused(where):
    linear = nn.Linear(4, 12)
    pin(linear, "weight", where)
    with pytest.raises(UsageError, match=r"weight has shape \(12, 4\), which cannot be cut"):
        pinned_placements(linear, num_ranks=2)


def test_the_search_takes_them_as_they_are():
    model = two_layers()
    unit = Unit(model, (torch.zeros(32, 64),), {})
    free = find_placements(unit, num_ranks=2).placements
    columns = Cut.even(1, 64, num_ranks=2)
    assert free["0.weight"] != columns
    found = find_placements(unit, num_ranks=2, pinned={"0.weight": columns, "0.bias": WHOLE}).placements
    assert found["0.weight"] == columns
    assert "0.bias" not in found
    all_whole = {name: WHOLE for name, _ in model.named_parameters()}
    assert find_placements(unit, num_ranks=2, pinned=all_whole).placements == {}


def test_units_with_other_pins_are_of_other_kinds():
    units = {f"layer{index}": Unit(two_layers(), (torch.zeros(32, 64),), {}) for index in range(3)}
    pinned = {"layer1.0.weight": WHOLE, "layer1.2.weight": WHOLE}
    found = find_placements(units, num_ranks=2, pinned=pinned).placements
    assert found["layer0.0.weight"] == found["layer2.0.weight"]
    assert not [name for name in found if name.startswith("layer1.") and name.endswith("weight")]
