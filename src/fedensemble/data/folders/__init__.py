"""Folders of files as data: which files there are, their classes and their clients."""
