"""The output side of commands, as text."""
