"""Sharded data parallelism: the ranks of a shard group keep some rows of each parameter."""
