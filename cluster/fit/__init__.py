"""Fit: memory needs of a plan against the memory of devices and hosts, and changes that make a load fit. Pure.

Read `needs.py` first, then `device_map.py` (modules on several devices), `search.py` (fit="auto" and what a refusal
offers) and `options.py` (the arguments of a load about fitting).
"""
