"""What Longshore tells of loads: reports (`report`, `rank_report`), events, chunk maps, metrics, logs and traces.

Metrics: `families` defines them, `stats` travel in heartbeats, `tally` adds them up, `samples` makes a page of them.
"""
