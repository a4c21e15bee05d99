"""Decides how to split a model: from its trace, unit costs, machines and settings to a plan.

It imports no framework: a laptop plans a model of any size.
"""

from shardwright.planner.chain import Chain
from shardwright.planner.degrees import best_of_meshes, meshes
from shardwright.planner.model_chain import build_chain
from shardwright.planner.profiles import (
    count_groups,
    estimate_profile,
    microbatch_counts,
    statistics_are_split,
)
from shardwright.planner.rank_memory import offloaded_bytes
from shardwright.planner.replay import overruled_settings, schedule_of, stage_costs_of
from shardwright.planner.search import Candidates, make_plan

__all__ = [
    "Candidates",
    "Chain",
    "best_of_meshes",
    "build_chain",
    "count_groups",
    "estimate_profile",
    "make_plan",
    "meshes",
    "microbatch_counts",
    "offloaded_bytes",
    "overruled_settings",
    "schedule_of",
    "stage_costs_of",
    "statistics_are_split",
]
