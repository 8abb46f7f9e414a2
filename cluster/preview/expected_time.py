"""How long a load should take, from bandwidths that were given or measured. Pure.

    store    bytes that leave the store, all nodes together   at the store's rate
    network  the most that one node fetches of them           at the rate of a node's link
    disk     the most that one node has on its disk           at the rate of reading there
    place    the most that one rank has                       at the rate into a device

Stages overlap, so the slowest of them is the time, and it is the limit. A stage without a rate is left out, and the
estimate says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.errors import ConfigError
from cluster.units import parse_bytes

if TYPE_CHECKING:
    from cluster.telemetry.report import LoadReport

STAGES = ("store", "network", "disk", "place")
_HINT = 'write it like "5GB/s" or "40Gbit/s"; a number is bytes per second'


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second; None: not known."""

    store: float | None = None  # out of the store, all nodes together
    network: float | None = None  # into one node
    disk: float | None = None  # off the disk of one node
    place: float | None = None  # into the memory of one rank, verified
    start_s: float = 0.0  # before the first byte: planning, starting workers
    source: str = "given"  # "measured": with a load

    @property
    def known(self) -> bool:
        return any(getattr(self, stage) is not None for stage in STAGES)

    def over(self, measured: Rates) -> Rates:
        """These, and what was measured where these do not say."""
        rates = {stage: getattr(self, stage) or getattr(measured, stage) for stage in STAGES}
        mixed = "given and measured" if self.known else measured.source
        return Rates(**rates, start_s=self.start_s or measured.start_s, source=mixed)


@dataclass(frozen=True, slots=True)
class ExpectedTime:
    """An estimate."""

    total_s: float
    start_s: float
    limit: str  # the stage that takes longest
    stages_s: dict[str, float]  # of each stage whose rate is known
    source: str  # where the rates come from: "given", "measured"
    unknown: tuple[str, ...]  # stages that have something to do, and no rate

    @property
    def sentence(self) -> str:
        """For people."""
        stages = ", ".join(f"{stage} {seconds:.3g} s" for stage, seconds in self.stages_s.items())
        start = f", {self.start_s:.3g} s before the first byte" if self.start_s else ""
        without = f"; no rate of {' and '.join(self.unknown)} is known" if self.unknown else ""
        return f"{self.total_s:.3g} s, limit: {self.limit} ({stages}{start}; rates {self.source}{without})"


def expect(
    store_bytes: int, node_bytes: int, rank_bytes: int, rates: Rates, disk_bytes: int = 0
) -> ExpectedTime | None:
    """For so many bytes from the store, of them into the busiest node, off the busiest disk, and into the largest rank.

    None: no rate is known.
    """
    amounts = {"store": store_bytes, "network": node_bytes, "disk": disk_bytes, "place": rank_bytes}
    stages = {stage: amounts[stage] / rate for stage in STAGES if (rate := getattr(rates, stage)) is not None}
    if not stages:
        return None
    limit = max(stages, key=lambda stage: stages[stage])
    unknown = tuple(stage for stage in STAGES if stage not in stages and amounts[stage])
    return ExpectedTime(stages[limit] + rates.start_s, rates.start_s, limit, stages, rates.source, unknown)


def parse_rate(given: str | float) -> float:
    """Bytes per second of `5GB/s`, `40Gbit/s` or a number. Raises ConfigError."""
    rate = 0.0
    if isinstance(given, int | float) and not isinstance(given, bool):
        rate = float(given)
    elif isinstance(given, str):
        bits = re.fullmatch(r"\s*(.+?)\s*(?:bit/s|bps|b/s)\s*", given) if "B/s" not in given else None
        text = bits[1] if bits else re.sub(r"\s*/\s*s\s*\Z", "", given)
        try:
            rate = parse_bytes(text) / (8 if bits else 1)
        except ConfigError:
            rate = 0.0
    if not (math.isfinite(rate) and rate > 0):
        raise ConfigError(f"not a rate: {given!r:.60}", hint=_HINT)
    return rate


def measured_rates(report: LoadReport | Mapping[str, Any]) -> Rates:
    """What a load reached, from its report (or the JSON of one): what each stage could have done had it been alone.

    A stage that was busy for half of the load time could have moved twice as much. Raises ConfigError for a report of a
    load that moved nothing, and for what is none.
    """
    try:
        document = report if isinstance(report, Mapping) else report.as_dict()
        load_s, ranks = float(document["load_s"]), len(document["ranks"])
        shares = {stage: float(share) for stage, share in document["limit"]["shares"].items()}
        moved = float(sum(document["bytes_by_source"][source] for source in ("store_via_arena", "store_direct")))
        placed = float(document["placed_bytes"])
        read = float(document["bytes_by_source"].get("disk", 0)) / max(1, len(document.get("nodes", ())))
        start_s = float(document["plan_s"]) + float(document["start_s"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            "not the report of a load", hint="`longshore load --json` prints one; LoadedModel.report is one"
        ) from error
    if not (0 < load_s < math.inf) or not ranks or moved + placed <= 0 or document.get("resident"):
        raise ConfigError("the report is of a load that moved nothing", hint="measure with a load from the store")
    into = sum(shares.get(stage, 0.0) for stage in ("verify", "memory", "place", "device"))
    return Rates(
        store=_alone(moved / load_s, shares.get("store", 0.0)),
        disk=_alone(read / load_s, shares.get("disk", 0.0)),
        place=_alone(placed / ranks / load_s, min(1.0, into)),
        start_s=start_s,
        source="measured",
    )


def _alone(rate: float, share: float) -> float | None:
    """A stage that was hardly busy shows nothing of what it can do."""
    return rate / share if rate > 0 and share >= 0.05 else None
