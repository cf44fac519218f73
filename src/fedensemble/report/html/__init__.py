"""The report as one HTML page that needs nothing else: no network, no other file."""

from .page import write_all, write_page

__all__ = ["write_all", "write_page"]
