"""Plans: from a model and a layout to the bytes that each rank reads, and a preview of a load before it starts.

Read `plan.py` first, then `cut_model.py`, `packed_plan.py` and `read_items.py`. `make_plan.py` reads stores and
`process.py` runs it in a child process. `preview.py` and `plan_summary.py` are `cluster.plan()`.
"""
