"""The learning checks: runs of the project's own parts on problems whose optimum is known.

Shared by the tests of this folder and by scripts/learning_checks.py.
"""
