"""Pipeline schedules: each rank's actions in order. Pure data and arithmetic; no framework.

::

    place_stages ─► build_schedule ─► lower ─► validate ─► the runtime
                          │                        ▲
                          └──────► simulate        └── read_torch_csv
"""

from shardwright.schedule.actions import Action, Kind
from shardwright.schedule.build import build_schedule, splits_backward
from shardwright.schedule.closed_form import bubble_seconds, peak_activations
from shardwright.schedule.edges import Edge, chain_edges
from shardwright.schedule.lower import lower
from shardwright.schedule.placement import KINDS, place_stages
from shardwright.schedule.schedule import Schedule
from shardwright.schedule.simulate import Event, Simulation, simulate
from shardwright.schedule.stage_cost import StageCost, unit_costs
from shardwright.schedule.torch_csv import (
    format_torch_csv,
    parse_torch_csv,
    read_torch_csv,
    write_torch_csv,
)
from shardwright.schedule.validate import validate

__all__ = [
    "KINDS",
    "Action",
    "Edge",
    "Event",
    "Kind",
    "Schedule",
    "Simulation",
    "StageCost",
    "bubble_seconds",
    "build_schedule",
    "chain_edges",
    "format_torch_csv",
    "lower",
    "parse_torch_csv",
    "peak_activations",
    "place_stages",
    "read_torch_csv",
    "simulate",
    "splits_backward",
    "unit_costs",
    "validate",
    "write_torch_csv",
]
