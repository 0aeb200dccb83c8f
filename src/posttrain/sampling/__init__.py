"""Rollout engines behind the `Sampler` protocol."""
