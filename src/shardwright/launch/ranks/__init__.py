"""Starts the ranks of a host, watches them, and reports how they ended."""
