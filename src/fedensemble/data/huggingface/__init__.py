"""Datasets of Hugging Face's `datasets` and partitioners of flwr-datasets; neither is imported."""
