"""What `cluster.plan` is told beside the model: memory, a cluster to ask for it, and the report of an earlier load."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.config import Config
from cluster.connection import connect
from cluster.errors import ClusterLost, ConfigError
from cluster.fit.device_fit import room_on
from cluster.fit.memory_given import GivenDevices, parse_memory
from cluster.fit.plan_fit import GIVEN, IN_CLUSTER, SEEN, Devices, rooms_of
from cluster.load_request import LoadRequest
from cluster.preview.expected_time import Rates, measured_rates
from cluster.reports.report import LoadReport
from cluster.scheduling.topology import NodeInfo
from storage.host.gpu_memory import GpuMemory, gpu_memory

Measured = LoadReport | Mapping[str, Any] | str | os.PathLike[str]
MAX_REPORT_BYTES = 256 << 20


def find_devices(
    memory: GivenDevices | None, address: str | None, request: LoadRequest, config: Config
) -> Devices | None:
    """What there is to fit into: given, asked of a cluster, or seen here; None when nobody knows.

    Raises ConfigError, ClusterLost.
    """
    if memory is not None and address is not None:
        raise ConfigError("memory was given and a cluster to ask for it", hint="leave one of memory and address away")
    if memory is not None:
        return Devices(rooms_of(parse_memory(memory), request, config), GIVEN)
    source = SEEN if address is None else IN_CLUSTER
    seen = gpu_memory() if address is None else _in_cluster(address, config)
    return Devices(tuple(room_on(gpu, request.fit, config) for gpu in seen), source) if seen else None


def _in_cluster(address: str, config: Config) -> tuple[GpuMemory, ...]:
    """GPUs of the cluster's nodes. Raises ClusterLost."""
    connection = connect(address, config, start=False)
    if connection is None:
        raise ClusterLost(
            "no Longshore coordinator runs in this cluster", hint='the first load starts one; memory="4x24GB" asks none'
        )
    infos: list[NodeInfo] = connection.call("rooms")
    return tuple(gpu for info in infos for gpu in info.gpus)


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
        raise ConfigError(
            f"{path} is not the report of a load: {error}", hint="`longshore load --json` prints one"
        ) from error
