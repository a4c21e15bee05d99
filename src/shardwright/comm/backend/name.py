"""The name by which torch.distributed knows the backend."""

__all__ = ["BACKEND"]

BACKEND = "shardwright"
