"""Attributes, lists and objects: the second channel between units."""
