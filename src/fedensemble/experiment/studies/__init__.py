"""Studies of several runs: comparisons, tables of the paper, advice, and training in batches."""
