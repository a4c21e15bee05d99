"""Training jobs as SageMaker's SDK describes them: what was asked for, resolved."""
