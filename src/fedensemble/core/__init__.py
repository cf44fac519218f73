"""Core types and protocols: modes, plans, visits and rounds, independent of data and engines."""
