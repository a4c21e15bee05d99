"""Finds the best distributed topology of a model on machines that need not exist; no framework."""

from shardwright.planner.ways.search import Answer, largest_batch, search
from shardwright.planner.ways.task import Task
from shardwright.planner.ways.way import Way, way_of

__all__ = ["Answer", "Task", "Way", "largest_batch", "search", "way_of"]
