"""A contender: a program that loads a model, its cases, and what its process is given.

The driver never calls a contender's function. It starts `python -m bench.contenders NAME SPEC` for each load.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

EXIT_NOT_RUNNABLE = 3
Source = Literal["http", "https", "file"]


class NotRunnable(Exception):
    """The contender is not installed or cannot run on this machine. The message says why."""


@dataclass(frozen=True, slots=True)
class BenchFile:
    """One file of the model."""

    key: str  # below the bucket: "model/model-00001-of-00004.safetensors"
    path: str  # the same file on this machine, absolute
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Spec:
    """One load by one contender. Over HTTP a file is at `{endpoint}/{bucket}/{key}`."""

    source: Source
    endpoint: str  # "http://127.0.0.1:4242"; "" for files
    bucket: str
    folder: str  # the model's folder on this machine, absolute
    files: tuple[BenchFile, ...]  # the safetensors files only, in order
    model_bytes: int  # sum of their sizes
    ca_bundle: str = ""  # PEM file to trust when the source is "https"
    options: Mapping[str, Any] = field(default_factory=dict)  # of scene, contender and setting, together

    def with_options(self, **options: Any) -> Spec:
        """Return a copy with these options over those it has."""
        return dataclasses.replace(self, options={**self.options, **options})

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """Read what `to_json` returned. Raises ValueError, TypeError."""
        fields = json.loads(text)
        return cls(**{**fields, "files": tuple(BenchFile(**one) for one in fields["files"])})


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of load that a contender measures: a row of the tables."""

    name: str  # "warm", "cold_unverified"; "" for the only one
    title: str = ""  # "not verified"
    checks: str = ""  # the hash by which every byte is compared; "": nothing is


@dataclass(frozen=True, slots=True)
class Contender:
    """A program that loads the model. One process of it measures all its cases, one after the other."""

    name: str
    title: str
    load: Callable[[Spec], None]  # each timed part in `bench.harness.measure.measured`
    cases: tuple[Case, ...]
    settings: tuple[Mapping[str, Any], ...] = ({},)  # tried before the rounds; the first is taken when none is tried
    needs: tuple[str, ...] = ()  # modules that have to be installed
    options: Mapping[str, Any] = field(default_factory=dict)  # in `Spec.options`, beside those of the setting
    environment: str = ""  # of an engine, as `tests/engine_environments/make.sh` makes it; "": the benchmark's own


def run_contender(contender: Contender, spec: str) -> int:
    """Do one load by that spec (JSON). Returns the exit code, with the reason on stderr when it cannot run."""
    try:
        for module in contender.needs:
            if importlib.util.find_spec(module) is None:
                raise NotRunnable(f"{module} is not installed")
        contender.load(Spec.from_json(spec))
    except NotRunnable as error:
        print(error, file=sys.stderr)
        return EXIT_NOT_RUNNABLE
    return 0
