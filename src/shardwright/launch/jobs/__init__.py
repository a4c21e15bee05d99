"""Training jobs in the form of SageMaker's SDK: the request, resolved."""
