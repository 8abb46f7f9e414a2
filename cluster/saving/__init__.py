"""Saving a checkpoint from the ranks of a job, decided in pure functions.

Read `shards` first (where every tensor lies in the files, and which parts are sent), then `held` (what each rank holds
of which tensor), then `plan` (who puts which part together, and who sends what to whom).
"""
