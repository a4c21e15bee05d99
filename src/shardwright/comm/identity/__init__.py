"""Which rank this process is, on which host, by what its launcher says."""
