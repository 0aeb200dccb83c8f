"""Pure tensor maths: one idea per file, no I/O, no model, no distribution.

Shapes: G members of a group, N loss tokens laid end to end, S sequences, V vocabulary.
`columns.py` says what functions may read; `builder.py` puts them together into the components and
credit rules of an `Algorithm`; everything else is functions.
"""
