"""What the kernel and their outputs tell of processes."""
