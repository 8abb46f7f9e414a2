"""The agent's side of a load: the node's chunks, the ranks that fetch them, and the copies that stay.

Read `node_ledger` first: it routes messages to the loads. Then `node_load` (one load), `chunk_flow` (its chunks),
`object_checks` and `chunk_sources`. `disk_backlog` and `node_resources` hold the disk tier and the arena's memory.
"""
