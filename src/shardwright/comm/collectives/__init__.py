"""Collectives that know which ranks share a host, on CPUs and accelerators, and as a backend of torch."""
