"""Where a rank's tensors live: GPUs, host memory, files, or several of these."""
