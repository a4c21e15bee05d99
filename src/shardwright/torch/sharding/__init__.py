"""Sharded data parallelism: each rank of a shard group keeps some rows of each parameter."""
