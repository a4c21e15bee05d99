"""The end of a training step: what all ranks tell each other before an update."""
