"""Helpers that public scripts import from the tests of the library."""
