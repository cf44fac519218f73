"""Models of single clients, made from a trained federation: choices, mixtures and fine-tuning."""
