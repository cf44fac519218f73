"""One forward and backward pass for the stacked parameters of many clients."""
