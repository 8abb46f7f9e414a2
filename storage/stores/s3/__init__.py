"""S3 and compatible servers.

Read `store` first, then `wire` (the hot path), then `session` (clients and their limits) and `signing` (routes and
signatures). `answers` checks what servers send, `upload` writes, `botocore_private` holds private names.
"""
