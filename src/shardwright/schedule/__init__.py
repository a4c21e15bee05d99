"""Pipeline schedules: each rank's actions in order. Pure data and arithmetic; no framework.

::

    place_stages ─► build_schedule ─► lower ─► validate ─► the runtime
                          │
                          └──────► simulate
"""

from shardwright.schedule.actions import Action, Edge, Kind, StageCost, chain_edges, unit_costs
from shardwright.schedule.build import build_schedule, lower, splits_backward, validate
from shardwright.schedule.placement import KINDS, place_stages
from shardwright.schedule.schedule import Schedule
from shardwright.schedule.simulate import Event, Simulation, simulate

__all__ = [
    "KINDS",
    "Action",
    "Edge",
    "Event",
    "Kind",
    "Schedule",
    "Simulation",
    "StageCost",
    "build_schedule",
    "chain_edges",
    "lower",
    "place_stages",
    "simulate",
    "splits_backward",
    "unit_costs",
    "validate",
]
