"""Object stores: one protocol, and the stores behind it.

Read `object_store` (the protocol) first, then `open_store` (which store for which URI), then `local`, `fsspec_store`
and `s3/`. All of them use `requests` (proxies, TLS, deadlines and retries).
"""
