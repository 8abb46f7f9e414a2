"""Reading a model in any process: chunks come when a tensor is asked for, and the processes of a node share them.

Read `state` first: it decides what a reader asks for and gives back. `read_ahead` guesses what comes next, and
`model_reader` runs the threads and copies boxes of tensors out of chunks.
"""
