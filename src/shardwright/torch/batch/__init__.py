"""A batch: from the first rank to the others, cut into microbatches, and what comes back."""
