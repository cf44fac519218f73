"""Samples per second of networks as they come; see `python benchmarks/models.py --help`."""

from fedensemble.bench.model_speed import main

if __name__ == "__main__":
    main()
