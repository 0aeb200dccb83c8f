"""Advantage estimators: one file and one function each.

An estimator is a pure function. Its positional parameters are columns, chosen by name
(`algo/columns.py` lists them); its keyword-only parameters are the fields of its config class. One
that reads columns of a group (`_G`) runs when a batch is built and returns [G], or one tensor [K]
of turns for each member. One that reads columns of tokens (`_N`) runs in the learner over the whole
step, where log-probs and values are known, and returns [N].
"""
