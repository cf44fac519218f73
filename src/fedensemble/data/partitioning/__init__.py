"""Partitions: rules that divide a dataset among clients."""
