"""Why a manifest is refused, in sentences that are safe to print."""

from __future__ import annotations

from pydantic import ValidationError

from storage.checkpoints.manifest_fields import MANIFEST_VERSION
from storage.errors import InvalidManifest, NewerManifest
from storage.problems import Problems, quote

MAX_ERRORS_LISTED = 100_000  # schema errors that are turned into sentences at all


def refusal(problems: Problems) -> InvalidManifest:
    """The error that lists them."""
    return InvalidManifest(
        f"invalid manifest: {problems}",
        hint="publish the model again, with `longshore publish`",
        problems=len(problems),
    )


def newer(version: int) -> NewerManifest:
    """The error for a manifest of a later version than ours."""
    return NewerManifest(
        f"manifest version {version}, this Longshore reads version {MANIFEST_VERSION}",
        hint="update Longshore to read it; a publish with force replaces it",
        version=version,
    )


def schema_problems(error: ValidationError) -> Problems:
    """Pydantic's findings as sentences; another format or version is the only one worth telling.

    Raises NewerManifest.
    """
    if error.error_count() > MAX_ERRORS_LISTED:
        return Problems([f"{error.error_count()} entries are not what the format asks for"])
    found = error.errors(include_url=False, include_context=False)
    for entry in found:
        if entry["type"] == "missing":
            continue
        if entry["loc"] == ("format",):
            return Problems([f"not a Longshore manifest: format is {quote(entry['input'])}"])
        if entry["loc"] == ("version",):
            version = entry["input"]
            if isinstance(version, int) and version > MANIFEST_VERSION:
                raise newer(version)
            return Problems([f"manifest version {quote(version)}, this Longshore reads version {MANIFEST_VERSION}"])
    return Problems(
        f"{quote('.'.join(map(str, entry['loc'])))[1:-1]}: {entry['msg']}" if entry["loc"] else entry["msg"]
        for entry in found
    )
