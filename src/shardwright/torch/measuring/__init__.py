"""Times units, plans the run, and reports what happens."""
