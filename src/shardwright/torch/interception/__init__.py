"""Every torch function and unit call of a step function comes by here, with tensors that have no data yet."""
