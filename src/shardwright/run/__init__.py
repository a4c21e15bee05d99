"""A run over ranks, whatever computes on them: what every front end stands on."""
