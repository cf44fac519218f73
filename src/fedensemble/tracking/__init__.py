"""Trackers: log the metrics of a run to TensorBoard or MLflow."""
