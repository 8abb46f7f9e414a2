"""Every error has its exit code."""

from __future__ import annotations

import pytest

import cluster.errors as load_errors
import storage.errors as byte_errors
from cluster.command_line.answers import EXIT_CODES, exit_code
from cluster.joining.patience import Terminated
from longshore.installation import PackageShadowed
from longshore.main import EXIT_SHADOWED
from storage.errors import LongshoreError


@pytest.mark.parametrize(
    ("code", "kinds"),
    [
        (1, "LongshoreError LoadError ChunkFailed RankLost NodeLost LoadTimeout LoadCancelled PublishError"),
        (1, "RemoteCallFailed CallTimeout"),
        (2, "ConfigError ModelNotFound InvalidUri"),
        (
            3,
            "PlanError LayoutError DoesNotFit ModelConfigError NotACheckpoint PickleRefused InvalidHeader InvalidIndex",
        ),
        (4, "NotEnoughResources DeviceUnavailable ArenaTooLarge ArenaTooSmall ArenaBusy ArenaCorrupt"),
        (5, "StoreError ObjectNotFound AccessDenied StoreUnavailable Throttled ShortRead RangeMismatch ObjectChanged"),
        (5, "ProxyRefused"),
        (6, "IntegrityError ManifestError InvalidManifest NewerManifest ManifestMismatch InvalidAmax"),
        (6, "RevisionMismatch SignatureError SignedNameMismatch WeakDigest"),
        (7, "DependencyChanged ClusterError ClusterLost VersionMismatch PackageMissing"),
    ],
)
def test_errors_map_to_codes(code: int, kinds: str) -> None:
    for name in kinds.split():
        kind = getattr(byte_errors, name, None) or getattr(load_errors, name)
        assert exit_code(kind("what")) == code, name


def test_other_exceptions_map_to_codes() -> None:
    assert exit_code(PackageShadowed("not ours")) == EXIT_SHADOWED == 7
    assert exit_code(RuntimeError("a bug")) == 1
    assert exit_code(KeyboardInterrupt()) == 130
    assert exit_code(Terminated()) == 143


def test_unlisted_errors_have_the_code_of_their_nearest_base() -> None:
    class NewStoreTrouble(byte_errors.StoreUnavailable):
        pass

    assert exit_code(NewStoreTrouble("what")) == 5


def test_codes_are_distinct_and_kinds_named_once() -> None:
    codes = [row.code for row in EXIT_CODES]
    kinds = [kind for row in EXIT_CODES for kind in row.errors]
    assert len(set(codes)) == len(codes)
    assert len(set(kinds)) == len(kinds)
    assert LongshoreError in kinds
