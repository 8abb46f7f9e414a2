"""The picture of a plan as a file that the user names."""

from __future__ import annotations

import os
from pathlib import Path

from cluster.errors import ConfigError
from cluster.preview.plan_summary import PlanSummary


def picture_path(given: str | os.PathLike[str]) -> Path:
    """Where the picture is to go. Raises ConfigError for what cannot be meant."""
    path = Path(given)
    if path.suffix.lower() != ".svg":
        raise ConfigError(f"a picture is an SVG file, not {path.name!r:.60}", hint="name it plan.svg")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder for the picture: {path.parent}")
    return path


def write_picture(path: Path, summary: PlanSummary, uri: str) -> None:
    """Raises ConfigError when it cannot be written."""
    try:
        path.write_text(titled_picture(summary, uri), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the picture cannot be written: {error.strerror}", path=str(path)) from error


def titled_picture(summary: PlanSummary, uri: str) -> str:
    """An SVG of ranks against layers."""
    return summary.picture(f"{uri}: {summary.layout}")
