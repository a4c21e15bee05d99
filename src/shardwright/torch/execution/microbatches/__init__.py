"""One microbatch on one rank: the step function, and what it finds and leaves on the way."""
