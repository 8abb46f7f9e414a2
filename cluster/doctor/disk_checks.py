"""The disk tier's folder on this machine, as `longshore doctor` finds it."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.config import Config
from cluster.doctor.check import Check
from cluster.units import show_bytes
from storage.disk.tier import DiskTier
from storage.host.memory import free_bytes, is_memory_backed

NAME = "disk tier"


def check_disk_tier(config: Config) -> Iterator[Check]:
    """Opened as an agent opens it. What killed writers left goes; no chunk does, whatever the settings say here."""
    if config.disk_folder is None:
        yield Check(NAME, "skip", "off; LONGSHORE_DISK_CACHE_DIR names a folder that keeps chunks for the next cluster")
        return
    tier = DiskTier(config.disk_folder, config.disk_cache_bytes)  # (what it raises is the check's outcome)
    try:
        free = free_bytes(tier.path)
        detail = (
            f"{len(tier)} chunks in {tier.path}, {show_bytes(tier.used_bytes)} of {show_bytes(tier.budget_bytes)}, "
            f"{show_bytes(free)} free"
        )
        if is_memory_backed(tier.path):
            yield Check(
                NAME, "warn", f"{detail}, in memory", "name a folder on a disk: this one takes the host's memory"
            )
        elif tier.budget_bytes - tier.used_bytes > free:
            yield Check(NAME, "warn", detail, "the disk is full before the budget is: set LONGSHORE_DISK_CACHE_BYTES")
        elif tier.budget_bytes < config.slot_bytes:
            yield Check(NAME, "warn", detail, "no chunk fits: raise LONGSHORE_DISK_CACHE_BYTES, or free some space")
        else:
            yield Check(NAME, "ok", detail)
    finally:
        tier.close()
