"""Plug-ins: models from a store in the engines that people run. They need `actors.reader`, and no Ray.

Each module needs its engine, and is imported by that engine or by the user. Importing this package costs nothing.
`transformers` has a function like `from_pretrained`.
"""
