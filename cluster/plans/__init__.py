"""From a model and a layout to what each rank reads, byte for byte. Pure but for the opening of the store."""
