"""Absent ranks: where they are, which failed first, and how errors report it."""
