"""Engines that simulate all clients in this process, one visit at a time or in blocks."""
