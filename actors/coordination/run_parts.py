"""The parts of the coordinator with which somebody acts for one model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from actors.coordination.model_record import ModelRecord
from actors.coordination.nodes import NodeAgents
from actors.coordination.planner import Planner, PlanSource
from actors.coordination.worker_groups import WorkerGroups
from cluster.config import Config


@dataclass(frozen=True, slots=True)
class RunParts:
    """The model's record, agents and plan, and what all models share. `LoadRun` and those that it makes have one."""

    record: ModelRecord
    agents: NodeAgents  # of the nodes that have its ranks
    source: PlanSource  # of its plan
    planner: Planner
    config: Config
    models: Mapping[str, ModelRecord]  # the coordinator's table, read to know what others hold
    admission: asyncio.Lock  # held while places are taken
    worker_groups: WorkerGroups

    @staticmethod
    def of(
        record: ModelRecord,
        planner: Planner,
        config: Config,
        models: Mapping[str, ModelRecord],
        admission: asyncio.Lock,
        worker_groups: WorkerGroups,
        given: Config | None,
    ) -> RunParts:
        """Return the parts for a model. `given`: see `spawn.start_agent`."""
        agents, source = NodeAgents(record, given), PlanSource(record, planner, config.holder_ttl_s)
        return RunParts(record, agents, source, planner, config, models, admission, worker_groups)
