"""This machine: its processors, its memory, its GPUs, its processes."""
