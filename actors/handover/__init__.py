"""A rank's tensors as the code that people run wants them: torch modules, DTensors, models of transformers."""
