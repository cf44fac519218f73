"""Serves the report of a run to a browser on this machine, and updates it while the run trains."""
