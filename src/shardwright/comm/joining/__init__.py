"""Joins the ranks of a run: the store, the group of all ranks, its session."""
