"""What the processes of a cluster logged: read on every node, named, filtered and merged."""
