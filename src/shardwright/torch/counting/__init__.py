"""Counts the cost of calls: FLOPs, bytes, random draws, hooks."""
