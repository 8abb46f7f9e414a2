"""One rank's side of a load: lease, fetch, verify, convert, place.

Read `state` first: it decides. `rank_work` adds the lock and the waits, `chunk_fetcher` and `chunk_placer` move the
bytes, `loader` talks with the agent and runs the threads, and `executor` is the loader of a rank.
"""
