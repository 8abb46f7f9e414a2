"""Chunks from one node to another: a server that sends them out of the arena, and a store that reads them.

The server knows files, offsets and keys of loads, and asks a `ChunkShelf` for everything else.
"""
