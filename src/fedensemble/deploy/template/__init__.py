"""A fleet that trains what config.toml says."""
