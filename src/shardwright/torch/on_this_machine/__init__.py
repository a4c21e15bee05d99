"""What is done on the present machines without a script: planning, probing."""
