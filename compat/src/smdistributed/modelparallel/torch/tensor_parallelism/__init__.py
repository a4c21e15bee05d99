"""Which modules of a script are distributed, and how they are when the model is wrapped."""
