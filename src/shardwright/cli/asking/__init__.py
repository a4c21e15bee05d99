"""The shared input side of commands: options, models and machines, measuring on ranks."""
