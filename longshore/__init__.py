"""The door: an import name nothing else takes, from which the three generic ones are checked and run.

`storage`, `cluster` and `actors` are names that a folder of anybody's may have. `longshore` looks where they
come from (`longshore.install_check`) before anything imports them, so it needs only the standard library.
"""
