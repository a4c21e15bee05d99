"""What the library puts in the place of parts of PyTorch."""
