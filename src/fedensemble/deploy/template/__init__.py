"""A Flower app that trains the config in config.toml."""
