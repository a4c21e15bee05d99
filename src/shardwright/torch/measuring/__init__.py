"""Times units, plans the run, and reports its progress."""
