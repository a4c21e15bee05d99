"""The messages of a step: point to point, small collectives, joint calls."""
