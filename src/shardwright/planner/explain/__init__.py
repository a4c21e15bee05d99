"""Explains a finished plan from its file: its replay, the parts of its step, what would help."""
