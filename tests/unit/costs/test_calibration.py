"""Efficiencies: those that ship, and the fit that they are from."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from shardwright.catalogue import find_architecture
from shardwright.cluster import parse_inventory
from shardwright.costs import Options, Rates, Shape, calibration_of, calibration_of_nodes, step_seconds
from shardwright.costs.calibration import PRIORS, Efficiencies

pytest.importorskip("scipy")
sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from fit import MeasuredRun, Runs, fit, leave_out, ratios
from published_memory import layout_shares
from published_runs import recipe_runs

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "published"
RATES = Rates(flops_per_s=312e12, memory_Bps=2e12, link_Bps=300e9, network_Bps=100e9, per_node=8.0)
SHAPE = Shape.of(find_architecture("llama3-8b"))


def test_what_is_calibrated_ships():
    for family, runtime in (
        ("A100", "megatron"),
        ("A100", "fsdp"),
        ("A100", "smp"),
        ("H100", "fsdp"),
        ("H100", "megatron"),
    ):
        found = calibration_of(family, runtime)
        assert found.provenance.startswith("calibrated on ")
        assert 0 < found.spread < 0.3
        low, high = found.interval(10.0)
        assert low < 10 < high


def test_a_runtime_that_changed_says_so():
    found = calibration_of("A100", "deepspeed")
    assert "of 2022; it changed much over the years (deepspeed-2021" in found.provenance
    assert calibration_of("A100", "deepspeed-2021").efficiencies.gather_network < 0.15


def test_what_nobody_measured_has_a_wider_interval():
    known = calibration_of("A100", "megatron")
    other_runtime = calibration_of("A100", "shardwright")
    other_family = calibration_of("TPU")
    assert known.spread < other_runtime.spread <= other_family.spread
    assert "not of shardwright" in other_runtime.provenance
    assert other_family.provenance.startswith("not calibrated for TPU")


def test_computing_hides_less_of_what_a_slower_network_takes():
    """What seems to go faster than the wire is hidden, and that does not grow as messages take longer."""
    known = calibration_of("H100", "megatron")
    assert known.network_Bps == 400e9
    assert known.efficiencies.exchange > 1.2
    assert known.efficiencies.reduce_network > 1
    rates = []
    for network in ("400GB/s", "200GB/s", "10Gbit", "800GB/s"):
        ((kind, _),) = parse_inventory(f"dgx-h100*2@{network}").nodes
        reached = calibration_of_nodes(kind, "megatron").efficiencies
        rates.append((reached.exchange, reached.reduce_network, reached.gather_link))
    own = (known.efficiencies.exchange, known.efficiencies.reduce_network, known.efficiencies.gather_link)
    assert rates[0] == rates[3] == pytest.approx(own)
    assert rates[1] == pytest.approx(((own[0] + 1) / 2, (own[1] + 1) / 2, own[2]))
    assert max(rates[2][:2]) < 1.01


def runs_of(truth, rng):
    found = []
    for runtime in ("one", "two"):
        for tensor in (1.0, 2.0, 4.0, 8.0):
            for microbatch in (1.0, 2.0, 8.0):
                options = Options(tensor=tensor, data=4.0, microbatch=microbatch, microbatches=8.0)
                own = replace(truth, matmul_factor=truth.matmul_factor * (0.9 if runtime == "two" else 1.0))
                seconds = float(step_seconds(SHAPE, options, RATES, own).total) * rng.lognormal(0, 0.01)
                found.append(
                    MeasuredRun(
                        name="run",
                        group="made up",
                        accelerator="A100",
                        runtime=runtime,
                        shape=SHAPE,
                        options=options,
                        rates=RATES,
                        step_s=seconds,
                    )
                )
    return Runs.of(found)


def test_a_fit_predicts_runs_that_it_has_not_seen():
    truth = Efficiencies(**{name: prior.median for name, prior in PRIORS.items()})
    runs = runs_of(replace(truth, matmul=0.6, link=0.4), np.random.default_rng(0))
    fitted = fit(runs)
    assert abs(ratios(runs, fitted) - 1).max() < 0.04
    told = []
    sixths = [number % 6 for number in range(len(runs.step_s))]
    apart = leave_out(runs, fitted, folds=sixths, told=lambda done, number: told.append((done, number)))
    assert abs(apart - 1).mean() < 0.03
    assert told == [(done, 24) for done in (4, 8, 12, 16, 20, 24)]
    factors = [fitted.of_runtimes[name]["matmul_factor"] for name in ("one", "two")]
    assert factors[1] / factors[0] == pytest.approx(0.9, rel=0.06)


def test_a_fit_without_a_run_knows_nothing_of_it():
    """A search for it begins at the fit to all runs, and ends where one from the priors does."""
    truth = Efficiencies(**{name: prior.median for name, prior in PRIORS.items()})
    runs = runs_of(replace(truth, matmul=0.6, link=0.4), np.random.default_rng(1))
    runs.step_s[3] *= 1.5
    fitted = fit(runs)
    alone = leave_out(runs, fitted, told=lambda done, number: None)
    afresh = replace(fitted, logarithms=np.log([PRIORS["matmul"].median] * len(fitted.logarithms)))
    assert alone[3] != pytest.approx(ratios(runs, fitted)[3], rel=0.01)
    assert leave_out(runs, afresh, told=lambda done, number: None) == pytest.approx(alone, rel=2e-3)


def test_published_layouts_fit():
    """Whatever ran in 80 GB is priced below what a search leaves of it."""
    recipes = recipe_runs(yaml.safe_load((PUBLISHED / "recipes.yaml").read_text()))
    assert len(recipes) > 50
    shares = layout_shares(recipes)
    assert {name: share for name, share in shares.items() if share >= 1} == {}
    # Not by a formula that forgets something.
    assert max(shares.values()) > 0.8
