"""The backend of the model parallel library: the names of its errors."""
