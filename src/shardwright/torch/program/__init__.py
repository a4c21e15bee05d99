"""Programs: what one rank does at each step of a traced step function."""
