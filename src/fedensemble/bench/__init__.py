"""Benchmarks that need no other package: one module per question, each prints its tables."""
