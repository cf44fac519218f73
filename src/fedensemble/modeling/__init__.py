"""A torch.nn.Module as a pure function of parameters, buffers, a batch and a PRNG key."""
