"""From a model and a layout to what each rank reads, byte for byte; and what a load would do, shown before it does.

Read `plan` first, then `cut_model`, `rank_plans` and `read_items`; `make_plan` reads stores, `preview` is `plan()`.
"""
