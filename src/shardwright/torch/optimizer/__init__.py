"""The optimizer as the script sees it, and clipping."""
