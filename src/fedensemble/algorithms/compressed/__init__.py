"""Algorithms whose messages are compressed: QSGD, DIANA and DORE."""
