"""A node's shared memory: its file, its slots, and which chunk is where."""
