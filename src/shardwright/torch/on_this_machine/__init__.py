"""Plans and probes the current machines without a script."""
