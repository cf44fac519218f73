"""Benchmarks that need no other package: one module a question, each prints one table of numbers
from one run.
"""
