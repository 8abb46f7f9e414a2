"""Saving a checkpoint from the ranks of a job: what touches torch, the process group and the store.

Read `save` first (the whole flow of `cluster.save`), then `held` (a state dict as bytes), `exchange` (messages between
ranks) and `writer` (parts, shards and the commit).
"""
