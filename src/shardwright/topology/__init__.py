"""Finds the best distributed topology of a model on machines that need not exist; no framework."""

from shardwright.topology.largest_batch import largest_batch
from shardwright.topology.search import Answer, search
from shardwright.topology.task import Task
from shardwright.topology.way import Way, way_of

__all__ = ["Answer", "Task", "Way", "largest_batch", "search", "way_of"]
