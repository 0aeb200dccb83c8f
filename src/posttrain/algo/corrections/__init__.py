"""Off-policy corrections: one file and one function each.

A correction is a pure function of columns of the whole step (`algo/columns.py` lists them), and
returns a weight for each token [N], without gradient: 0 drops it from the loss, not from the
denominators. Its keyword-only arguments are the fields of its config class. Several multiply.

w is prox / sampler of a token. Without drift every w is exactly 1, and so is every weight. None
depends on the order of the sequences, but for the random choice of clip_cov.
"""
