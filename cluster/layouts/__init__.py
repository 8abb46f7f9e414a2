"""Layouts: the mesh of ranks, the rules of model families, and the slices of each tensor that follow from them. Pure.

Read `mesh.py` first, then `families.py` and `rules.py` (the rule of a tensor, and its cut), `region.py` (the slice
of a rank), and `layout.py`, which decides about all tensors of a model.
"""
