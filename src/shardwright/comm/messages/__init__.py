"""Messages of a step: point to point, small collectives, calls that ranks make together."""
