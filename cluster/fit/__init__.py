"""Whether a plan fits the memory that there is, and what would make it fit. Pure."""
