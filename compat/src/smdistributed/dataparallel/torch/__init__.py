"""The data parallel library for PyTorch: the backend ``smddp``, and the functions of releases before 1.4."""
