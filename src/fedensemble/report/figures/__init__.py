"""Figures of a run, a comparison and the paper, drawn with matplotlib."""
