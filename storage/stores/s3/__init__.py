"""S3 and compatible servers. Read `store` first, then `wire` (the hot path), `session` and `signing` (credentials)."""
