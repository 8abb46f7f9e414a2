"""One rank's side of a load: lease, fetch, verify, convert, place.

Read `state` first: it decides. `rank_work` adds the lock and the waits, `chunk_fetcher` and `chunk_placer` move the
bytes, and `executor` runs the threads and the conversation with the agent.
"""
