"""Metrics sent to TensorBoard and MLflow."""
