"""What units offload comes back as it was: losses, gradients and states are those of a plain loop.

Every storage is offloaded, however small, so that models of a few kilobytes show it.
"""

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
from transparency import Case, Iteration, Recipe, differences_by_case
from zoo import ZOO

from choices import some_combinations, thorough
from shardwright.testing import run_ranks

ENV = {"TRANSFORMERS_VERBOSITY": "error"}
OFFLOADS = {"offload_activations": True, "profile": "estimated", "microbatches": 4}
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"pipeline": "gpipe"},
    "1f1b": {"pipeline": "1f1b"},
    "interleaved_1f1b": {"pipeline": "interleaved_1f1b", "virtual_stages": 2},
    "zb_h1": {"pipeline": "zb_h1"},
    "zb_v": {"pipeline": "zb_v"},
}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")


def differences_when_offloaded(
    recipe: Recipe, cases: Mapping[str, Case]
) -> tuple[dict[str, list[str]], list[str]]:
    """What differs, and the names of the copies that were made, on this rank."""
    from shardwright.torch.offload.disk import DiskTier

    made = []
    write, read = DiskTier.write, DiskTier.read

    def count_write(tier, memory):
        made.append("write")
        return write(tier, memory)

    def count_read(tier, place, memory):
        made.append("read")
        return read(tier, place, memory)

    with (
        patch("shardwright.torch.offload.offloading.LEAST_BYTES", 1),
        patch.object(DiskTier, "write", count_write),
        patch.object(DiskTier, "read", count_read),
    ):
        return differences_by_case(recipe, cases), made


def check(
    recipe: Recipe,
    cases: Mapping[str, Case],
    *,
    num_ranks: int = 2,
    writes: bool = True,
    reads: bool = True,
) -> None:
    found = run_ranks(differences_when_offloaded, num_ranks, recipe, cases, timeout_s=150, env=ENV)
    assert [differences for differences, _ in found] == [{}] * num_ranks
    copies = [kind for _, made in found for kind in made]
    assert ("write" in copies) is writes
    if reads:
        assert "read" in copies


def case(settings: Mapping[str, Any], **more: Any) -> Case:
    return Case(config={**OFFLOADS, **settings}, **more)


IN_EVERY_RUN = (
    "dropout in blocks",
    "changes in place",
    "changes views",
    "changes its input",
    "calls one module twice",
    "recomputes",
)


@pytest.mark.parametrize("name", [*IN_EVERY_RUN[:2], *map(thorough, IN_EVERY_RUN[2:])])
def test_models_over_two_stages(name):
    """Each takes its turn at the schedules."""
    number = list(ZOO).index(name)
    kind = list(SCHEDULES)[number % len(SCHEDULES)]
    iterations = (Iteration(), Iteration(batch_size=7), Iteration(train=False))
    settings = {**SCHEDULES[kind], "activation_loading_horizon": 1 + number % 3}
    cases = {kind: case(settings, iterations=iterations)}
    # Under `torch.utils.checkpoint` in the model's own code, units save little, or nothing.
    found = run_ranks(differences_when_offloaded, 2, ZOO[name], cases, timeout_s=150, env=ENV)
    assert [differences for differences, _ in found] == [{}] * 2
    assert name == "recomputes" or any("write" in made for _, made in found)


@pytest.mark.parametrize("kind", ["1f1b", "interleaved_1f1b", "zb_v"])
def test_schedules(kind):
    check(ZOO["dropout in blocks"], {kind: case({**SCHEDULES[kind], "activation_loading_horizon": 1})})


def test_recomputed_units_offload_their_inputs():
    settings = {**SCHEDULES["zb_h1"], "activation_checkpointing": "full", "activation_loading_horizon": 1}
    check(ZOO["dropout in blocks"], {"zb_h1": case(settings)})


REPLICAS = {
    "replicas of one stage": {"pipeline_parallel_degree": 1},
    "parameters in shards": {
        "pipeline_parallel_degree": 1,
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 1,
    },
    "parameters in shards that come and go": {
        "pipeline_parallel_degree": 1,
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 1,
        "sdp_max_live_parameters": 600,
    },
}


@pytest.mark.parametrize(("name", "recompute"), some_combinations(list(REPLICAS), ["none", "full"]))
def test_the_whole_model_on_each_rank(name, recompute):
    settings = {**REPLICAS[name], "activation_checkpointing": recompute, "activation_loading_horizon": 1}
    check(ZOO["dropout in blocks"], {name: case(settings)})


@pytest.mark.thorough
def test_pipelines_of_shards():
    settings = {
        "pipeline_parallel_degree": 2,
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 1,
        "activation_loading_horizon": 1,
    }
    check(ZOO["MLP"], {"1f1b": case({**settings, **SCHEDULES["1f1b"]})}, num_ranks=4)
