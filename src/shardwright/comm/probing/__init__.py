"""Measures messages, collectives and devices on the current machines."""
