"""Random numbers as one process would draw them."""
