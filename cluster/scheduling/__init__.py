"""The decisions of a load that runs: its states, its leases, its retries, its places. Pure."""
