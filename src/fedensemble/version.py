"""The version, where the build can read it without importing torch."""

VERSION = "0.1.0"
