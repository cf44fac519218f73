"""The report as one self-contained HTML page: it needs no network and no other file."""

from .page import write_all, write_page

__all__ = ["write_all", "write_page"]
