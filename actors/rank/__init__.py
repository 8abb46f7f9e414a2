"""One rank's side of a load: lease, fetch, verify, convert, place.

Read `state` first: it decides. `loader` talks with the agent, and runs the threads round the state. `chunk_fetcher` and
`chunk_placer` move the bytes, and `executor` is the loader of a rank.
"""
