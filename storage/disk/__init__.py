"""The disk tier: verified chunks on a node's disk, which outlive the arena, the agent and the cluster.

Read `tier` first (the writer and its budget), then `files` (the folder, the file format and the reader).
"""
