"""The optimizer that the script sees, and gradient clipping."""
