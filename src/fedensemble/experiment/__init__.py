"""From a config file to a finished run: validation, building, the run folder, running,
comparing.
"""
