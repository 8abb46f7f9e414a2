"""Device maps as Hugging Face Accelerate means them: modules over GPUs, host memory and disk. Pure."""
