"""The contenders: programs that load the model, each with its modes and the settings that are tried.

table.py lists them. Each has a function that does one load: it gets ready, and wraps what is timed in `measured(spec)`.
"""
