"""What commands have in common: options, models and machines on a command line, measuring on ranks."""
