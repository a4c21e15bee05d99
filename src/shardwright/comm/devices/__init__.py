"""Collectives over nodes, for tensors on accelerators."""
