"""Algorithms whose server distils an ensemble into a model: FedBE and FedSDD."""
