"""The model that the script sees."""
