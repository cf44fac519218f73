"""The command line: `main` defines the commands; each other module implements one of them."""
