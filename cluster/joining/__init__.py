"""How a process reaches a Ray cluster, notices that it is gone, and reads its errors."""
