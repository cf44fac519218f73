"""How time and memory grow with clients, modes, visits, rounds and client state.

    python benchmarks/growth.py [clients modes visits memory rounds] [--device cuda] [--scale 10]

Clients range from 100 to 100,000, modes from 1 to 80, visits from 100 to 10,000.
"""

from fedensemble.bench.scaling import main

if __name__ == "__main__":
    main()
