"""The search on small modules: which cuts it thinks of, how it weighs them, what it refuses.

Placements that a module's author has pinned: they fit, go with copies, and are no matter of the search.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from ranks_in_threads import on_ranks
from test_traffic import Block, Language
from torch import nn

from choices import some_combinations
from model_units import units_of
from shardwright.errors import UsageError
from shardwright.placement import WHOLE, Cut
from shardwright.torch.tensor_parallel.divide import divide, settle_gradients
from shardwright.torch.tensor_parallel.divided_tensor import whole
from shardwright.torch.tensor_parallel.group import Prices
from shardwright.torch.tensor_parallel.search.dry_run import dry_run
from shardwright.torch.tensor_parallel.search.flow import Flow, cut_candidates
from shardwright.torch.tensor_parallel.search.recording import group_without_ranks, record
from shardwright.torch.tensor_parallel.search.search import find_placements
from shardwright.torch.tensor_parallel.search.unit import Unit
from shardwright.torch.units.tensor_division import Pin, pin, pin_whole, pinned_placements

WIDTH, HEADS = 24, 4


class Fused(nn.Module):
    """Attention with a fused projection that comes apart in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y, shape = self.qkv(x), (*x.shape[:2], HEADS, WIDTH // HEADS)
        if self.way == "split":
            parts = [each.view(shape) for each in y.split(WIDTH, dim=-1)]
        elif self.way == "chunk":
            parts = [each.view(shape) for each in y.chunk(3, dim=-1)]
        elif self.way == "slices":
            parts = [y[..., a : a + WIDTH].view(shape) for a in range(0, 3 * WIDTH, WIDTH)]
        elif self.way == "three first":
            parts = y.view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).unbind(2)
        else:
            parts = y.view(*x.shape[:2], HEADS, 3 * WIDTH // HEADS).chunk(3, dim=-1)
        q, k, v = (each.transpose(1, 2) for each in parts)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(x.shape))


def unit_of(module, tokens=8):
    return Unit(module, (torch.zeros(2, tokens, WIDTH, requires_grad=True),))


IN_THREE = Cut.in_segments(0, [HEADS] * 3, num_ranks=3).times(WIDTH // HEADS)


@pytest.mark.parametrize(
    ("way", "cut"),
    [
        ("split", IN_THREE),
        ("chunk", IN_THREE),
        ("slices", IN_THREE),
        ("three first", IN_THREE),
        ("heads first", Cut.even(0, HEADS, num_ranks=3).times(3 * WIDTH // HEADS)),
    ],
)
def test_segments_and_heads_are_seen_in_the_step(way, cut):
    """Over 3 ranks, 4 heads of 6: no cut that forgets the segments or the heads is the same."""
    flow = Flow(record(unit_of(Fused(way))), group_without_ranks(0, 3, Prices()))
    candidates = cut_candidates(flow, "qkv.weight", 0, 3)
    assert cut in candidates
    assert candidates[-1] == Cut.even(0, 3 * WIDTH, num_ranks=3)
    # With it, attention needs nothing from the other ranks until the rows of the output.
    rows = Cut.even(1, HEADS, num_ranks=3).times(WIDTH // HEADS)
    placements = {"qkv.weight": cut, "qkv.bias": cut, "out.weight": rows}
    traffic = dry_run(unit_of(Fused(way)), placements, rank=0, num_ranks=3).traffic
    assert traffic.calls == {"all_reduce": 2}


# Exchange is dear against work, or cheap: many plans of a step are then tried and priced.
PRICES = [Prices(), Prices(latency_s=1e-3), Prices(latency_s=1e-9, bandwidth_Bps=1e12)]


@pytest.mark.parametrize(("prices", "fused"), some_combinations(PRICES, [True, False]))
def test_found_placements_are_exact_and_send_what_they_cost(prices, fused):
    torch.manual_seed(0)
    model = Language(2, fused=fused, norm=nn.LayerNorm).double()
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    unit = Unit(model, (ids,))
    found = find_placements(unit, num_ranks=2, prices=prices)
    planned = dry_run(unit, found.placements, rank=0, num_ranks=2, prices=prices)
    seconds = planned.traffic.calls.total() * prices.latency_s
    seconds += planned.traffic.sent_bytes.total() / prices.bandwidth_Bps
    assert found.price.exchange_s == pytest.approx(seconds, rel=1e-9)
    copies = [copy.deepcopy(model) for _ in range(2)]
    model(ids).backward()

    def on_rank(group):
        group.prices = prices
        own = copies[group.rank]
        divide(own, found.placements, group)
        loss = own(ids)
        whole(loss)  # what leaves a unit is whole
        loss.backward()
        settle_gradients(own.parameters())
        for name, parameter in own.named_parameters():
            have, want = whole(parameter.grad), model.get_parameter(name).grad
            torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-12)

    on_ranks(2, on_rank)


def test_columns_then_rows_of_a_block():
    found = find_placements(
        Unit(Block(fused=True, norm=nn.LayerNorm), (torch.zeros(2, 16, 32, requires_grad=True),)), num_ranks=2
    )
    cut = Cut.in_segments(0, [32] * 3, num_ranks=2)
    assert found.placements == {
        "qkv.weight": cut,
        "qkv.bias": cut,
        "out.weight": Cut.even(1, 32, num_ranks=2),
        **{
            f"{name}.{key}": Cut.even(0, 128, num_ranks=2)
            for name in ("up", "gate")
            for key in ("weight", "bias")
        },
        "down.weight": Cut.even(1, 128, num_ranks=2),
    }


def test_where_memory_is_short_more_is_divided():
    """A slow network: for speed the layer stays whole, for memory it is divided."""
    unit = Unit(nn.Linear(64, 64), (torch.zeros(64, 64, requires_grad=True),))
    prices = Prices(bandwidth_Bps=1e8)
    speed = find_placements(unit, num_ranks=2, prices=prices)
    memory = find_placements(unit, num_ranks=2, prices=prices, optimize="memory")
    assert not speed.placements
    assert memory.divided > 0.9
    # More microbatches to a step: the gradients' settlement weighs less than the work.
    many = find_placements(unit, num_ranks=2, prices=prices, num_microbatches=64)
    assert many.whole_price.work_s == pytest.approx(64 * speed.whole_price.work_s)


class Model(nn.Module):
    """Layers of two kinds; the first table is tied to the last matrix."""

    def __init__(self, *, twice=False, unused=False):
        super().__init__()
        self.table = nn.Embedding(256, 32)
        self.layers = nn.ModuleList(Block(fused=index < 2, norm=nn.LayerNorm) for index in range(4))
        self.head = nn.Linear(32, 256, bias=False)
        self.head.weight = self.table.weight
        self.twice, self.unused = twice, unused

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers[: 3 if self.unused else 4]:
            x = layer(x)
        if self.twice:
            x = self.layers[0](x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


NAMES = [f"layers.{index}" for index in range(4)]


def test_units_of_a_kind_are_searched_once():
    model = Model()
    ids = torch.zeros(2, 16, dtype=torch.int64)
    units = units_of(model, (ids,), units=NAMES)
    found = find_placements(units, num_ranks=2)
    assert found.kind_of == {
        "": "",
        **dict.fromkeys(NAMES[:2], NAMES[0]),
        **dict.fromkeys(NAMES[2:], NAMES[2]),
    }
    assert found.of_unit("layers.0") == found.of_unit("layers.1")
    assert found.of_unit("layers.2") == found.of_unit("layers.3")
    assert found.of_unit("layers.0") == find_placements(units["layers.0"], num_ranks=2).placements
    # One name of the tied table is enough, as `divide` has it.
    assert "table.weight" in found.placements
    assert "head.weight" not in found.placements
    assert found.divided == pytest.approx(
        sum(model.get_parameter(name).numel() for name in found.placements)
        / sum(each.numel() for each in model.parameters())
    )


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
