"""Runs, comparisons and reproductions: set-up, training, evaluation and the files of a run."""
