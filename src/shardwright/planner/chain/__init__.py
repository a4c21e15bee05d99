"""The model as a chain of unit calls: what each costs, what flows between them, what must stay together."""
