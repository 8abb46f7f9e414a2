"""The contenders: programs that load the model, each with its modes and the settings that are tried.

table.py lists all of them. A contender is added there, with a function that does one load: it imports what it needs,
gets ready (clients made, connections not yet used for weights), and wraps what is timed in `measured(spec)`.
"""
