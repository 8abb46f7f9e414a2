"""Which part of which tensor each rank holds: the mesh, the families' rules, and the cuts that follow. Pure."""
