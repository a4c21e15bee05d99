"""Messages between the ranks of a host: sockets and shared memory."""
