"""Benchmarks, one module for each command: `python -m bench.run` is Longshore beside its peers, README.md lists all.

Read contenders/table.py for what is compared, harness/ for how it is measured, then run.py, which joins the two.
"""
