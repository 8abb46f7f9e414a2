"""What a contender is told: where the model is and how to read it. Travels as one JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Source = Literal["http", "https", "file"]


@dataclass(frozen=True, slots=True)
class BenchFile:
    """One file of the model."""

    key: str  # below the bucket: "model/model-00001-of-00004.safetensors"
    path: str  # the same file on this machine, absolute
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Spec:
    """One run of one contender. Over HTTP a file is at `{endpoint}/{bucket}/{key}`."""

    source: Source
    endpoint: str  # "http://127.0.0.1:4242"; "" for files
    bucket: str
    prefix: str  # of every key, without a slash at the end; the model is s3://{bucket}/{prefix}
    folder: str  # the model's folder on this machine, absolute
    files: tuple[BenchFile, ...]  # the safetensors files only, in order
    model_bytes: int  # sum of their sizes
    ca_bundle: str = ""  # PEM file to trust when the source is "https"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the case and of the setting, together

    def with_options(self, **options: Any) -> Spec:
        """The same with these options over those it has."""
        return dataclasses.replace(self, options={**self.options, **options})

    def write(self, path: str | Path) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def read(cls, path: str | Path) -> Spec:
        """Read what `write` wrote. Raises OSError, ValueError, TypeError."""
        fields = json.loads(Path(path).read_text())
        return cls(**{**fields, "files": tuple(BenchFile(**one) for one in fields["files"])})
