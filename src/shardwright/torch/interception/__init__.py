"""Intercepts every torch function and unit call of a step function."""
