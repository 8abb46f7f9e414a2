"""The memory of a rank's tensors: GPUs, host memory, files, or several of these.

Read `device` first (the protocol that all devices follow), then `cpu_device`, `cuda_device` and `mapped_device`.
`convert` casts and quantizes tensors on their way into a device.
"""
