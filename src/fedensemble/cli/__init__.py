"""The command line: `main` defines the commands, `commands` implements them."""
