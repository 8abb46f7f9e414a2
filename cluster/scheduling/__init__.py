"""Pure decisions about a running load: its states, leases, retries, placements and holders.

Read `load_state.py` first, then `topology.py` (placements), `lease_queue.py`, `retry.py` and
`concurrency.py` (fetching), and `holders.py` (when a model may be released).
"""
