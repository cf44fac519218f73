"""How time and memory grow with clients (100 to 100,000), modes (1 to 80), visits (100 to 10,000)
and rounds.

python benchmarks/growth.py [clients modes visits memory rounds] [--device cuda] [--scale 10]
"""

from fedensemble.bench.scaling import main

if __name__ == "__main__":
    main()
