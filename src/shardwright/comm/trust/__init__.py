"""The secret of a run: messages that nobody else can write, sockets that nobody else can reach."""
