"""The secret of a run: messages that nobody else can write, and sockets that nobody else can reach."""
