"""Weights: model folders, the forward pass, the optimizer step, checkpoints."""
