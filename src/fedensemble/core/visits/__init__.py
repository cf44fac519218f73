"""Visits: what a client gets, does and reports when it trains a mode in a round."""
