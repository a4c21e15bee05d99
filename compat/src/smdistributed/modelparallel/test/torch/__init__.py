"""Helpers that public scripts import from the PyTorch tests of the library."""
