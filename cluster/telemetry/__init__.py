"""Reports, events, chunk maps, metrics, logs and traces of loads.

Metrics: `metrics` defines them, `stats` travel in heartbeats, `counters` puts the agents' side by side on one page.
Read `stats` first, then `counters` and `report`.
"""
