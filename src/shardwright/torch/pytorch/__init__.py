"""Knowledge of PyTorch and Python: trees of tensors, layouts, schemas, source lines."""
