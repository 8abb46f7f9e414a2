"""What a load was asked about memory: refuse or look for what fits, and how much stays free. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.errors import ConfigError

if TYPE_CHECKING:
    from cluster.config import Config  # brings pydantic

STRICT, AUTO = "strict", "auto"
MODES = (STRICT, AUTO)


@dataclass(frozen=True, slots=True)
class FitTry:
    """One step of fit="auto"."""

    what: str  # "as given", 'quantization="int8"'
    need_bytes: int  # of the largest rank; 0: it could not be planned
    why_not: str = ""  # it does not fit, or cannot be; "": this is what was taken


def what_was_taken(tried: Sequence[FitTry]) -> str:
    """What was changed: 'quantization="int8"'; "" when the model is as it was asked for."""
    return tried[-1].what if len(tried) > 1 else ""


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How a load has to fit. Raises ConfigError for what cannot be meant.

    `gpu_memory_utilization` as engines have it: the part of a GPU's memory, 0 to 1, that may be in use in all. Of the
    three that say what stays free (this, `reserve_bytes` and the settings' reserve) the one that leaves most holds.
    """

    mode: str = STRICT  # "auto": takes less precision, in steps, until it fits
    gpu_memory_utilization: float | None = None
    reserve_bytes: int | None = None  # kept free on each GPU, or on each host for CPU ranks

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"fit must be one of {', '.join(MODES)}, not {self.mode!r:.40}")
        share = self.gpu_memory_utilization
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
            raise ConfigError(
                f"gpu_memory_utilization must be above 0 and at most 1, not {share!r:.40}",
                hint="it is the part of each GPU's memory that may be in use in all: 0.9 leaves a tenth free",
            )
        left = self.reserve_bytes
        if left is not None and (isinstance(left, bool) or not isinstance(left, int) or left < 0):
            raise ConfigError(f"reserve_bytes must be a whole number of bytes from 0 on, not {left!r:.40}")

    def check_device(self, device: str) -> None:
        """Raises ConfigError when what was asked means nothing for ranks on `device`."""
        if device == "cpu" and self.gpu_memory_utilization is not None:
            raise ConfigError(
                "gpu_memory_utilization is about GPUs, and the ranks are in host memory (device=cpu)",
                hint="reserve_bytes keeps memory of the hosts free",
            )

    def kept_free_bytes(self, total_bytes: int, config: Config) -> int:
        """Of a GPU with so much memory: what the load must leave."""
        kept = max(config.device_reserve_bytes, self.reserve_bytes or 0)
        if self.gpu_memory_utilization is not None:
            kept = max(kept, total_bytes - math.floor(total_bytes * self.gpu_memory_utilization))
        return min(kept, total_bytes)

    def host_reserve_bytes(self, config: Config) -> int:
        """Of a host: what the load must leave."""
        return max(config.host_reserve_bytes, self.reserve_bytes or 0)

    def identity(self) -> tuple[object, ...]:
        """What of it decides what a load holds in the end: without a choice nothing does."""
        return () if self.mode == STRICT else (self.mode, self.gpu_memory_utilization, self.reserve_bytes)
