"""What commands show, as text."""
