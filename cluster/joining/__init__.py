"""Joining: how a process reaches a Ray cluster, notices that it is lost, and reads Ray's errors.

Read `ray_join.py` first (joining or starting a cluster), then `connection.py` (calls of the coordinator), `patience.py`
(limits of a wait) and `node_tasks.py`. `ray_private.py` has all private names of Ray.
"""
