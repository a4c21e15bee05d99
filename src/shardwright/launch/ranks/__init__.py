"""Starts the ranks of a host, watches them, and says what became of them."""
