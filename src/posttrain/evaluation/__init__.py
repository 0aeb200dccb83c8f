"""Evaluation: what a score is, how sure it is, and whether two scores differ."""
