"""Encodes values and tensors as bytes and back, without running code."""
