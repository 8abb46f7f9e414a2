"""Reading a model in any process: chunks come when a tensor is asked for, and the processes of a node share them.

Read `state` first: it decides what a reader asks for and gives back. `model_reader` runs the threads, reads ahead and
copies boxes of tensors out of chunks. `host` finds the process that owns the arena, over the socket of `door`.
`open_model` is what users see, and `lazy_tensor` what engines copy.
"""
