"""Facts about this machine.

`processes` identifies processes and measures CPU usage. `memory` reads the memory of the host and of its GPUs.
"""
