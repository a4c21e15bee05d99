"""Collectives over CPUs that know which ranks share a host."""
