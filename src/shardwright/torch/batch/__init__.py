"""Batches: broadcast to a replica, cut into microbatches, and their results."""
