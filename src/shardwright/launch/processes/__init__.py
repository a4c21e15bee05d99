"""What the kernel and their output reveal about processes."""
