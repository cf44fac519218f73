"""Engines that simulate all clients in this process: one after another, or a block of clients at
once.
"""
