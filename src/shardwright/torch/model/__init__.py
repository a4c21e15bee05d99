"""The model as the script sees it."""
