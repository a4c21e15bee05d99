"""Processes, by what the kernel and their output reveal of them."""
