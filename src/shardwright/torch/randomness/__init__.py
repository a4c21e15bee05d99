"""Random numbers as a single process draws them."""
