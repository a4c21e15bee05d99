"""Cuts a chain into stages on ranks: the cost of every possible stage, and the cuts themselves."""
