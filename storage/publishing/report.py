"""What a publish did, for people and for `--json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What a publish did."""

    uri: str  # where the manifest is
    revision: str
    hash_name: str
    chunk_bytes: int
    shards: int
    tensors: int
    chunks: int
    files: int  # other files that the manifest names
    size_bytes: int  # of all shards
    read_bytes: int  # this time, every reading counted
    copied_bytes: int  # written to the destination
    resumed: int  # shards and files that an earlier, interrupted publish had finished
    unchanged: bool  # the manifest was there and is for what is stored: nothing was read
    checks: dict[str, int]  # how the source was checked -> number of objects
    skipped: tuple[str, ...]  # not published: weights that are no part of the model, odd names, fifos, links to nowhere
    elapsed_s: float
    amax: bool = False  # the manifest lists the largest value of each row of the weights
    signed_by: str | None = None  # id of the key that the manifest is signed with, by this publish or already
    signed_name: str | None = None  # the name that it is signed under

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        return asdict(self)
