"""Entry points that engines call. They check first that no folder of the user's hides our packages."""

from __future__ import annotations

from longshore.installation import check_packages


def vllm() -> None:
    """Register the load format "longshore". vLLM calls this in each of its processes, maybe more than once."""
    check_packages("engines")
    import engines.vllm  # noqa: F401
