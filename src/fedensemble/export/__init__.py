"""Writes an ensemble as one file that runs without this package: ONNX or torch.export."""
