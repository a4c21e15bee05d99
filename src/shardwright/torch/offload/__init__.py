"""Moves what units keep for their backward out of a device's memory, and back ahead of its use."""
