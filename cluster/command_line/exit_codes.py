"""From an error to the exit code of the command `longshore`. One table; README prints it."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.errors import (
    ClusterError,
    ClusterLost,
    ConfigError,
    DeviceUnavailable,
    ModelConfigError,
    ModelNotFound,
    NotEnoughResources,
    PackageMissing,
    PlanError,
    VersionMismatch,
)
from cluster.joining.interrupts import Terminated
from longshore.install_check import PackageShadowed
from storage.errors import (
    ArenaError,
    CheckpointError,
    DependencyChanged,
    IntegrityError,
    InvalidKey,
    InvalidUri,
    LongshoreError,
    ManifestError,
    StoreError,
)

OK = 0
FAILED = 1
USAGE = 2  # argparse's own
INTEGRITY = 6
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
TERMINATED = 143  # 128 + SIGTERM


@dataclass(frozen=True, slots=True)
class ExitCode:
    """One row: errors of these kinds, and kinds below them that no other row names, end with `code`."""

    code: int
    meaning: str
    errors: tuple[type[BaseException], ...] = ()


EXIT_CODES = (
    ExitCode(OK, "done"),
    ExitCode(FAILED, "the load, publish, check or call failed", (LongshoreError, Exception)),
    ExitCode(
        USAGE,
        "wrong arguments or settings, or no such model in the cluster",
        (ConfigError, ModelNotFound, InvalidUri, InvalidKey),
    ),
    ExitCode(
        3,
        "refused before anything moved: no loadable checkpoint there, does not fit, cannot be cut as asked",
        (PlanError, CheckpointError, ModelConfigError),
    ),
    ExitCode(
        4,
        "not enough GPUs, shared memory or other resources",
        (NotEnoughResources, DeviceUnavailable, ArenaError),
    ),
    ExitCode(
        5, "the store: unreachable, refused, no such bucket, an object that is missing or has changed", (StoreError,)
    ),
    ExitCode(INTEGRITY, "integrity: bytes or manifest are not the published ones", (IntegrityError, ManifestError)),
    ExitCode(
        7,
        "the cluster: lost, without the package, of another version, or our packages are shadowed",
        (ClusterError, ClusterLost, VersionMismatch, PackageMissing, PackageShadowed, DependencyChanged),
    ),
    ExitCode(
        INTERRUPTED, "interrupted with Ctrl-C; a load that was to stay goes on in the cluster", (KeyboardInterrupt,)
    ),
    ExitCode(TERMINATED, "ended with SIGTERM", (Terminated,)),
)
_CODE_OF = {kind: row.code for row in EXIT_CODES for kind in row.errors}


def exit_code(error: BaseException) -> int:
    """The code of the nearest class of `error` that the table names; 1 for what nobody foresaw."""
    return next((_CODE_OF[kind] for kind in type(error).__mro__ if kind in _CODE_OF), 1)
