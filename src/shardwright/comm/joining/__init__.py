"""Joins the ranks of a run: its secret, the store, the group of all ranks, its session."""
