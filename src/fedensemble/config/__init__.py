"""Configuration: reads TOML files, validates settings, and builds the objects they describe."""
