"""What calls cost: FLOPs, bytes, random draws, hooks."""
