"""Runs the calls of a traced step function on tensors without data."""
