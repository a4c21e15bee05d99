"""Attention without a table of all scores."""
