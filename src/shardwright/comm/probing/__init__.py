"""Measures what messages, collectives and devices cost on the present machines."""
