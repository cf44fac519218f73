"""Comparisons of finished runs with the closed forms of `theory`."""
