"""What the library knows of PyTorch and Python: trees of tensors, layouts, schemas, source lines."""
