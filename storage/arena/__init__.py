"""The shared memory of one node.

Read `slots` first (slot states, records and shares), then `chunk_cache` (which chunk is in which slot), then `arena`
(the mapped file). `arena_files` names, sizes and removes arena files.
"""
