"""Parameters that all modes share, and parameters that are personal to a client."""
