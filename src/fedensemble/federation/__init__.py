"""A federation: clients' data, a model and an algorithm, trained round by round."""

from .federation import Federation

__all__ = ["Federation"]
