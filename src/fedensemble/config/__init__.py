"""Configuration files: TOML layers, validation, and the objects they describe."""
