"""Attention backends, SAGE quantization and Skip-Softmax for diffusion models. Needs only torch."""
