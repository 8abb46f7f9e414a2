"""Object stores: one protocol (`object_store`) and what implements it.

`open_store` chooses the store for a place. `local`, `fsspec_store` and `s3/` implement it.
`retrying` and `read_limit` serve all of them, `streaming` reads whole objects, and `store_checksum` compares them with
the store's checksum.
"""
