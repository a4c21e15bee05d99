"""Chooses the units of a model: the modules that are placed whole."""
