"""A rank's tensors in the form that user code needs: torch modules, DTensors, models of transformers.

Read `module_places` first (a module's parameters and buffers by name). `modules` puts the tensors into the module.
"""
