"""Chains of layers: their tables, their cuts, their costs."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.catalogue import Layer, LayerChain
from shardwright.costs import (
    BF16,
    KindOfRank,
    Options,
    Rates,
    ScheduleKind,
    calibration_of,
    chain_prices,
)
from shardwright.costs.chain import stage_ends

RATES = Rates(flops_per_s=312e12, memory_Bps=1.5e12, link_Bps=300e9, network_Bps=50e9, per_node=8.0)
REACHED = calibration_of("A100").efficiencies


def prices(chain, options, rates=RATES):
    kind = KindOfRank(ranks=1, rates=rates, reached=REACHED, memory_bytes=1e15)
    return chain_prices(chain, options, [kind], rates, precision=BF16, width=2)


def chain_of(*flops, parameters=1_000_000):
    layers = tuple(
        Layer(
            name=str(number),
            parameters=parameters,
            flops=each,
            moved=each / 100,
            kept=each / 200,
            inputs=each / 800,
            crossing=each / 800,
        )
        for number, each in enumerate(flops)
    )
    return LayerChain(name="chain", layers=layers)


@given(weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=9).map(tuple), stages=st.integers(1, 9))
def test_the_heaviest_stage_is_as_light_as_can_be(weights, stages):
    stages = min(stages, len(weights))
    ends = stage_ends(weights, stages)

    def heaviest(found):
        return max(sum(weights[a:b]) for a, b in zip((0, *found[:-1]), found, strict=True))

    cuts = itertools.combinations(range(1, len(weights)), stages - 1)
    assert len(ends) == stages
    assert ends[-1] == len(weights)
    assert heaviest(ends) == pytest.approx(min(heaviest((*cut, len(weights))) for cut in cuts), rel=1e-6)


def test_columns_are_what_single_ways_are():
    chain = chain_of(*(1e9 * (1 + n % 3) for n in range(12)))
    columns = {
        "pipeline": np.array([1.0, 2, 4, 2, 4]),
        "virtual": np.array([1.0, 1, 1, 2, 2]),
        "data": np.array([8.0, 4, 2, 4, 2]),
        "schedule": np.array(
            [
                *(int(ScheduleKind.ONE_F_ONE_B),) * 3,
                int(ScheduleKind.ZB_V),
                int(ScheduleKind.INTERLEAVED),
            ],
            dtype=float,
        ),
        "microbatch": np.array([1.0, 2, 4, 2, 1]),
        "microbatches": np.array([8.0, 8, 8, 4, 16]),
        "recompute": np.array([0.0, 2, 0, 2, 0]),
    }
    together = prices(chain, Options(**columns), RATES).seconds
    memory = prices(chain, Options(**columns)).num_bytes
    for number in range(5):
        one = Options(**{name: float(column[number]) for name, column in columns.items()})
        assert prices(chain, one, RATES).seconds.total == pytest.approx(together.total[number])
        alone = prices(chain, one).num_bytes
        assert float(alone.total) == pytest.approx(memory.total[number])
