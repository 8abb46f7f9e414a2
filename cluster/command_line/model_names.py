"""What a user calls a load: its id, or the beginning of it that no other load has."""

from __future__ import annotations

from cluster.errors import ConfigError
from cluster.reports.report import ClusterStatus

_OVER = ("failed", "released")
SHOWN = 5


def full_id(given: str, status: ClusterStatus) -> str:
    """The id that is meant; `given` itself when nothing begins so. Those that are over count when no other does.

    Raises ConfigError when several may be meant. Pure.
    """
    states = {model.progress.model_id: model.progress.state for model in status.listed}
    if given in states or not given:
        return given
    found = [model_id for model_id in states if model_id.startswith(given)]
    found = [model_id for model_id in found if states[model_id] not in _OVER] or found
    if len(found) > 1:
        names = ", ".join(found[:SHOWN]) + ", ..." * (len(found) > SHOWN)
        raise ConfigError(f"{len(found)} loads begin so: {names}", hint="give more of the id", load=given)
    return found[0] if found else given
