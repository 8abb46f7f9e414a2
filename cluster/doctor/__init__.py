"""`longshore doctor`: checks of the installation, the machine, the cluster and the store.

Read `doctor.py` first, which runs all checks. They are in `host_checks.py` (this machine), `node_checks.py`
(each node) and `peer_checks.py` (between nodes).
"""
