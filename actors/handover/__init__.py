"""A rank's tensors in the form that user code needs: torch modules, DTensors, models of transformers.

Read `tensor_views` first (tensors as views into a rank's memory), then `module_places` (a module's parameters and
buffers by name). `modules` puts the tensors into the module.
"""
