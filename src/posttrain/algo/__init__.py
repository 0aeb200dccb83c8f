"""Pure tensor maths: one idea per file, no I/O, no model, no distribution.

Shapes: G members of a group, N loss tokens laid end to end, S sequences, V vocabulary.
`algorithm.py` puts the ideas together for a recipe; everything else is functions.
"""
