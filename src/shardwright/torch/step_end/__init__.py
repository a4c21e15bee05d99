"""The end of a training step: what all ranks exchange before an update."""
