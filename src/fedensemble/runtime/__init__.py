"""The machine: hardware, threads, memory, and the private names of torch."""
