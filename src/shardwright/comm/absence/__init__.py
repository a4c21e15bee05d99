"""Ranks that do not come: where they are, who failed first, and how errors say so."""
