"""Ranks that share layers offload their parts of what units keep: exact, and in the memory of the plan.

Every storage is offloaded, however small, so that models of a few kilobytes show it.
"""

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
from test_shared_layers import CHANGING, RECOMPUTED, SCHEDULES, Recipe, case, language
from torch import Tensor
from transparency import Case, differences_by_case

from choices import in_sweep, thorough
from shardwright.testing import run_ranks

OFFLOADS = {"offload_activations": True, "activation_loading_horizon": 1}


def differences_when_offloaded(recipe: Recipe, cases: Mapping[str, Case]) -> tuple[dict[str, list[str]], int]:
    """What differs, and how many storages left."""
    from shardwright.torch.offload.disk import DiskTier

    written = []
    write = DiskTier.write

    def count_write(tier: Any, memory: Tensor) -> Any:
        written.append(memory.nbytes)
        return write(tier, memory)

    with (
        patch("shardwright.torch.offload.offloading.LEAST_BYTES", 1),
        patch.object(DiskTier, "write", count_write),
    ):
        return differences_by_case(recipe, cases), len(written)


def check(recipe: Recipe, cases: Mapping[str, Case], *, num_ranks: int) -> None:
    found = run_ranks(differences_when_offloaded, num_ranks, recipe, cases, timeout_s=200)
    assert [differences for differences, _ in found] == [{}] * num_ranks
    assert all(num_written > 20 for _, num_written in found)


@pytest.mark.thorough
@pytest.mark.parametrize("num_ranks", [2, thorough(3)])
def test_ranks_offload_their_parts(num_ranks: int) -> None:
    cases = {
        "other shapes, evaluations": case(num_ranks, OFFLOADS, iterations=CHANGING),
        "inputs": case(num_ranks, {**OFFLOADS, **RECOMPUTED}),
    }
    check(language(tied=True, dropout=0.1), cases, num_ranks=num_ranks)


@pytest.mark.parametrize("way", [in_sweep("stages"), thorough("stages and back"), thorough("shards")])
def test_stages_and_shards_of_parts(way: str) -> None:
    settings = {**OFFLOADS, "microbatches": 4}
    shards = {
        "pipeline_parallel_degree": 1,
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 1,
    }
    cases = {
        "stages": case(2, {**settings, **SCHEDULES["1f1b"]}),
        "stages and back": case(2, {**settings, **SCHEDULES["zb_v"]}),
        "shards": case(2, {**settings, **shards}),
    }
    check(language(tied=True, dropout=0.1), {way: cases[way]}, num_ranks=4)
