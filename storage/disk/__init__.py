"""Verified chunks on a node's disk."""
