"""Collectives on CPUs that know which ranks share a host."""
