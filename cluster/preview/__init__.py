"""What a load would do, shown before it does: `cluster.plan()` and `longshore plan`."""
