"""Precision: the formats that tensors are stored in, and their conversion during a load. Pure.

Read `recipes.py` first (casts and quantization during a load), then `written_quantization.py` (how their result is
described). Quantized checkpoints are `quantized_tensors.py`, by `cluster.layouts.model_config`.
"""
