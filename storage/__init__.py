"""Bytes: where they are stored, how they are checked, and where a node keeps them. Knows no ranks, no Ray and no torch.

Read `stores/` first (object stores), then `checkpoints/` (models in them) and `publishing/` (manifests), then `arena/`
and `disk/` (chunks on a node). `errors` has the tree of all errors. `host/` reads facts about this machine.
"""
