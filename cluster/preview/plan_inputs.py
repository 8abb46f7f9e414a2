"""What `cluster.plan` is told beside the model: memory of devices, and the report of an earlier load."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.config import Config
from cluster.errors import ConfigError
from cluster.fit.device_fit import room_on
from cluster.fit.memory_given import GivenDevices, parse_memory
from cluster.fit.plan_fit import GIVEN, IN_CLUSTER, SEEN, Devices, rooms_of
from cluster.load_request import LoadRequest
from cluster.preview.expected_time import Rates, measured_rates, parse_rate
from cluster.reports.report import LoadReport
from cluster.scheduling.topology import NodeInfo
from storage.host.gpu_memory import gpu_memory

Rate = str | float | None
Measured = LoadReport | Mapping[str, Any] | str | os.PathLike[str]
MAX_REPORT_BYTES = 256 << 20
_HINT = "`longshore load --json` prints one"


def find_devices(
    memory: GivenDevices | None, nodes: Sequence[NodeInfo] | None, request: LoadRequest, config: Config
) -> Devices | None:
    """What there is to fit into: given, that of a cluster's `nodes`, or seen here; None when nobody knows.

    Raises ConfigError.
    """
    if memory is not None:
        return Devices(rooms_of(parse_memory(memory), request, config), GIVEN)
    source = SEEN if nodes is None else IN_CLUSTER
    seen = gpu_memory() if nodes is None else [gpu for node in nodes for gpu in node.gpus]
    return Devices(tuple(room_on(gpu, request.fit, config) for gpu in seen), source) if seen else None


def given_rates(store: Rate, network: Rate, disk: Rate, place: Rate) -> Rates:
    """As they were given. Raises ConfigError."""
    parsed = [None if rate is None else parse_rate(rate) for rate in (store, network, disk, place)]
    return Rates(parsed[0], parsed[1], parsed[2], parsed[3])


def read_rates(given: Measured) -> Rates:
    """Rates of an earlier load, from its report or the file of it. Raises ConfigError."""
    if isinstance(given, LoadReport | Mapping):
        return measured_rates(given)
    path = Path(given)
    try:
        if path.stat().st_size > MAX_REPORT_BYTES:
            raise ConfigError(f"{path} is too large for the report of a load")
        return measured_rates(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not the report of a load: {error}", hint=_HINT) from error
