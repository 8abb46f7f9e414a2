"""Stored models: their files, headers, manifest, tensors and chunks. Everything comes from a bucket and is not trusted.

Read `model_index` (the result) first, then `safetensors_header` and `manifest` (its sources), then `checkpoint_files`
(which files belong to a model) and `checkpoint` (opens a model). `amax` holds the recorded maxima of weights,
`replaced_files` the small files that a save replaces.
"""
