"""Policy losses per token, in the flat layout: one file and one function each.

A loss is a pure function. Its positional parameters are columns of the micro-batch, chosen by name
(`algo/columns.py` lists them); its keyword-only parameters are the fields of its config class. A
masked position never enters, so nothing that it holds (NaN included) can reach a loss.
"""
