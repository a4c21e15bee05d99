"""Decides how to split a model: from its trace, unit costs, machines and settings to a plan.

It imports no framework: a laptop plans a model of any size.
"""

from shardwright.planner.adopt import overruled_settings, schedule_of, stage_costs_of
from shardwright.planner.chain.batch_statistics import (
    count_groups,
    statistics_are_split,
    statistics_of_whole_batch,
)
from shardwright.planner.chain.chain import Chain
from shardwright.planner.chain.estimate import estimate_profile
from shardwright.planner.chain.model_chain import build_chain
from shardwright.planner.memory.rank_memory import offloaded_bytes
from shardwright.planner.search.degrees import best_of_meshes, best_plans, meshes
from shardwright.planner.search.microbatch_counts import microbatch_counts
from shardwright.planner.search.search import Candidates, make_plan

__all__ = [
    "Candidates",
    "Chain",
    "best_of_meshes",
    "best_plans",
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
    "statistics_of_whole_batch",
]
