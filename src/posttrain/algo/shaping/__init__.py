"""Reward shaping: one file and one function each.

A shaping rule is a pure function of columns of a group (`algo/columns.py` lists them); it returns
what is added to the rewards, [G], before any statistic. Its keyword-only arguments are the fields
of its config class. A rule reads outcomes and never shaped rewards, so several add up in any order.
"""
