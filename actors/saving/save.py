"""`cluster.save`: the ranks of a job write one checkpoint together, without gathering it anywhere.

    tables of tensors --merge--> who holds what --lay_out--> files, parts --schedule--> rounds
    round: receive pieces of others and send them theirs --> parts are whole --> hashed and written by threads
    records of parts --> rank 0 --> journal; when all are written: commit

A rank holds at most `slots` parts at a time, which is all that it holds of other ranks' bytes. Half of the slots are
filled by the round that runs (`actors.saving.exchange`), while the parts of the round before are written.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError

from actors.saving.exchange import Agreed, Exchange, Peak, Ranks, Slots
from actors.saving.handles import wait_for_background_saves
from actors.saving.held import DIGEST_BYTES, HeldTensors
from actors.saving.hf_names import as_stored, config_files
from actors.saving.reporting import SaveReporter
from actors.saving.training_state import LINK_KEY, STATE_KEY, collect_state, link_file
from actors.saving.writer import (
    Begun,
    CheckpointWriter,
    PartsDiffer,
    begin_save,
    check_extra_files,
    claim_state,
    stored_chunks,
)
from cluster.argument_types import checks_arguments
from cluster.config import Config
from cluster.errors import SaveError, SaveRefused
from cluster.options import REVISION
from cluster.request import StoreOptions, open_folder
from cluster.saving.held import Merged, RankTable, arguments_text, differing, drifted, merge, shared_pieces
from cluster.saving.plan import PlannedPart, Schedule, schedule
from cluster.saving.shards import (
    DEFAULT_SHARD_BYTES,
    MIN_SHARD_BYTES,
    ShardLayout,
    lay_out,
    new_revision,
    renamed,
    revision_of_file,
)
from cluster.saving.unchanged import StoredChunks
from cluster.telemetry.saves import PUBLISHING, WRITING
from storage.checkpoints.model_index import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from storage.checksum import MANIFEST_HASH_NAMES
from storage.errors import DependencyChanged, LongshoreError
from storage.problems import Problems, quote
from storage.publishing.save_history import remember_save
from storage.publishing.saves import PartRecord, writes_parts
from storage.store_ref import Credentials
from storage.stores.object_store import ObjectStore
from storage.stores.open_store import UNSAVABLE
from storage.stores.requests import RetryPolicy

ExtraFiles = Mapping[str, bytes | str | os.PathLike[str]] | Sequence[str | os.PathLike[str]]
DEFAULT_SLOTS = 4
# For an error that ends the save at or after these steps of its commit.
_VISIBLE_HINTS = {
    "manifest": "its revision may be visible: `longshore saves` says which one is published; save again if it is not",
    "cleanup": "its revision is published and visible: do not save it again",
}
ROUNDS_PER_GATHER = 4  # after so many rounds the records of written parts go to rank 0
_COUNTS = struct.Struct("<4Q")  # of a rank, before its records
_RECORDS = TypeAdapter(tuple[PartRecord, ...])


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The result of a save. Numbers of bytes are sums over all ranks, seconds are of the rank that reports."""

    uri: str
    revision: str  # of the manifest, as loads report it
    save_id: str  # in the names of the files
    rank: int
    world_size: int
    shards: int
    tensors: int
    tied: dict[str, str]  # name that is not stored -> the name under which its bytes are
    size_bytes: int  # of all shards
    written_bytes: int  # sent to the store
    reused_bytes: int  # of parts that an interrupted save had written and that are the same
    copied_bytes: int  # of parts that the store copied from the revision before
    moved_bytes: int  # sent from rank to rank
    peak_foreign_bytes: int  # most bytes of other ranks that one rank held at a time
    plan_s: float
    exchange_s: float
    write_s: float  # waiting for the last parts to be written
    commit_s: float
    elapsed_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return asdict(self)


@checks_arguments
def save(
    state_dict: Mapping[str, Any],
    uri: str | os.PathLike[str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    process_group: Any = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    extra_state: Mapping[str, Any] | None = None,
    extra_files: ExtraFiles | None = None,
    since: str | None = "latest",
    keep_last: int | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    hash_name: str = "blake3",
    chunk_bytes: int | None = None,
    slots: int = DEFAULT_SLOTS,
    save_timeout_s: float = 600.0,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    anonymous: bool = False,
    credentials: Credentials | None = None,
    config: Config | None = None,
) -> SaveReport:
    """Save the tensors of a job as one published checkpoint. Every rank calls it, with its own part.

    The revision that is at the URI stays loadable until the new one is complete. A save that was interrupted continues
    when it is called again.

    Args:
        state_dict: Tensors by name: plain ones, DTensors, ShardedTensors. A tensor that is whole on several ranks is
            written once.
        uri: Folder of the checkpoint, in an object store or on a file system that all ranks share. It may have an older
            revision.
        rank: Number of this rank. It is compared with that of the process group, if there is one. None: as that says.
        world_size: Number of ranks, in the same way. With both and without a process group, the ranks meet at
            MASTER_ADDR and MASTER_PORT, as torchrun sets them.
        process_group: Group whose ranks save. None: the default group of torch.distributed. Without one, and without
            `rank` and `world_size`, this process saves alone.
        model: The module that the state dict is of, in any wrapper. With a model of transformers, tensors have the
            names and shapes that `save_pretrained` writes, and its config.json is written too. None: only the names
            that wrappers add go.
        optimizer: Also save the state of this optimizer, or of several, for `load_training_state`. Needs `model`. Pass
            it on every rank.
        scheduler: Also save the state of this scheduler, or of anything with `state_dict()`. That of rank 0 counts.
        extra_state: Also save these values by name: numbers, texts, lists, dicts, tensors. Those of rank 0 count,
            but for DTensors and ShardedTensors, of which every rank gives its part.
        extra_files: Further files of the model, such as config.json: contents or paths by name, or a list of paths.
            Those of rank 0 are written. Each is read once, when the save begins, and stays in memory until its end.
        since: Revision whose unchanged parts the store copies instead of getting them again: "latest", which is the
            one that is published there, or its revision. None, or the revision of another: send everything.
        keep_last: Number of revisions whose files stay, this one included. Older ones are removed when this one is
            visible. None: all stay.
        max_shard_bytes: Most bytes of tensors in a file.
        hash_name: Digest of the chunks: "blake3" or "xxh3_128".
        chunk_bytes: Size of chunks in bytes, 1 MiB to 16 MiB. None: as the settings say, 8 MiB.
        slots: Most parts that this rank holds at a time. A part has 5 MiB and at most two chunks more.
        save_timeout_s: Longest time in seconds that a rank waits for the others without progress. A rank that died is
            noticed within half of it, or 30 s.
        endpoint_url: URL of an S3-compatible server. None: as the AWS configuration says, else the provider's own.
        region: Region of the bucket. None: as the environment says.
        profile: Name of a profile in the AWS configuration.
        anonymous: Send unsigned requests.
        credentials: Keys for the store, a `storage.store_ref.Credentials`. None: those that the environment provides.
        config: Settings. None: read from the `LONGSHORE_*` variables of the environment.

    Returns:
        What was written, on every rank.

    Raises:
        SaveRefused: Arguments or tensors cannot be saved. It lists every problem of every rank.
        SaveConflict: Another save or publish wrote to the URI meanwhile.
        SaveError: Another rank ended the save or died; `details["rank"]` names it.
        StoreError: The store cannot be written.

    Example:
        ```python
        report = cluster.save(model.state_dict(), "s3://models/run-7", extra_files=["config.json"])
        print(report.revision)
        ```
    """
    started_s = time.monotonic()
    wait_for_background_saves()
    given = Arguments(
        uri=os.fspath(uri),
        process_group=process_group,
        rank=rank,
        world_size=world_size,
        model=model,
        since=since,
        keep_last=keep_last,
        max_shard_bytes=max_shard_bytes,
        hash_name=hash_name,
        chunk_bytes=chunk_bytes,
        slots=slots,
        save_timeout_s=save_timeout_s,
        endpoint_url=endpoint_url,
        region=region,
        profile=profile,
        anonymous=anonymous,
        credentials=credentials,
        config=config,
    )
    with given.meet() as ranks:
        given = given.with_files(extra_files, ranks)
        has_state = not (optimizer is None and scheduler is None and extra_state is None)
        state = collect_state(model, optimizer, scheduler, extra_state, ranks.rank) if has_state else ({}, b"")
        number = agree_on_state(ranks, optimizer, has_state)
        if number:  # which is written before the model
            state_dict = check_tensors(state_dict, given, ranks)
            given = replace(given, keeps_names=True)
        return save_tensors(state_dict, save_training(number, state, given), ranks, started_s)


def agree_on_state(ranks: Ranks, optimizer: Any, has_state: bool) -> str:
    """Return the number under which all ranks save the state of rank 0; "": it has none.

    Raises Agreed with SaveRefused if some ranks alone have an optimizer, whose parts would be missing.
    """
    answer = (b"o" if optimizer is not None else b"-") + (new_revision().encode() if has_state else b"")
    answers = ranks.gather(answer)
    without = [rank for rank, answer in enumerate(answers) if answer[:1] != b"o"]
    if 0 < len(without) < len(answers):
        named = f"{', '.join(map(str, without[:8]))}{', ...' if len(without) > 8 else ''}"
        raise Agreed(
            SaveRefused(f"no optimizer is given on rank {named}", hint="pass optimizer= on every rank, or on none")
        )
    return answers[0][1:].decode("ascii", "replace")


def save_training(number: str, state: tuple[Mapping[str, Any], bytes], given: Arguments) -> Arguments:
    """Save the state of a training run in a folder of its own, and return the arguments with a file that names it.

    It is complete before the model refers to it. All ranks give the same number; "": there is no state. The state of an
    interrupted save is continued under its own number. Its tensors keep their names, by which the other file of the
    state refers to them. Arguments were checked before.
    """
    if not number:
        return given
    tensors, data = state
    with given.meet() as ranks:
        note = b""
        if ranks.rank == 0:
            with contextlib.closing(given.open_store()) as store:
                note = claim_state(store, number).encode()
        claimed = ranks.broadcast(note, 0).decode("ascii", "replace")
        found = claimed.partition(".")[0]
        of_state = replace(
            given,
            uri=f"{given.uri.rstrip('/')}/training/{found}",
            model=None,
            files={STATE_KEY: data},
            since=given.since and "latest",
            keep_last=None if found == number else 1,
            keeps_names=True,
        )
        report = save_tensors(tensors, of_state, ranks, time.monotonic())
    return replace(given, state=claimed, files={**given.files, **link_file(found, report.revision)})


def check_tensors(state: Mapping[str, Any], given: Arguments, ranks: Ranks) -> dict[str, Any]:
    """Return a state dict as it is stored. Raises on every rank what a save of it would refuse."""
    return _Save(ranks, given, time.monotonic()).agree(state).stored


def save_tensors(state: Mapping[str, Any], given: Arguments, ranks: Ranks, started_s: float) -> SaveReport:
    """Save tensors and files as one checkpoint. It ends the ranks' connection with an error of any of them."""
    with SaveReporter(given.uri, ranks.rank, ranks.size, started_s) as reporter:
        with ranks:  # which are told first how it ended
            report = _Save(ranks, given, started_s).run(state, reporter)
        reporter.published(revision=report.revision)
    return report


def read_files(files: ExtraFiles | None, others: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the contents of the files beside the weights by their names: others, and extra files, which replace them.

    Each is read once, here, so that a file that changes later is stored as it is now. Raises SaveRefused, which lists
    every problem.
    """
    if isinstance(files, Mapping):
        pairs = list(files.items())
    else:
        pairs = [(os.path.basename(os.fspath(path)), path) for path in files or ()]
    found, names = dict(others), [name for name, _ in pairs]
    problems = Problems(f"two files are called {quote(name)}" for name in sorted(set(names)) if names.count(name) > 1)
    for name, contents in pairs:
        if isinstance(contents, bytes):
            found[name] = contents
        elif not os.path.isfile(contents):
            problems.add(f"{quote(name)}: no such file: {quote(os.fspath(contents))}")
        else:
            try:
                found[name] = Path(contents).read_bytes()
            except OSError as error:
                problems.add(f"{quote(name)} cannot be read: {error.strerror}: {quote(os.fspath(contents))}")
    for problem in check_extra_files(found):
        problems.add(problem)
    if problems:
        raise SaveRefused(f"extra_files: {problems}")
    return found


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of `save`, but for the tensors and the state of the training run."""

    uri: str
    process_group: Any
    rank: int | None
    world_size: int | None
    model: Any
    since: str | None
    keep_last: int | None
    max_shard_bytes: int
    hash_name: str
    chunk_bytes: int | None
    slots: int
    save_timeout_s: float
    endpoint_url: str | None
    region: str | None
    profile: str | None
    anonymous: bool
    credentials: Credentials | None
    config: Config | None
    files: Mapping[str, bytes] = field(default_factory=dict)  # that are stored beside the weights; of rank 0
    problems: tuple[str, ...] = ()  # that are found before ranks compare their arguments
    keeps_names: bool = False  # tensors are stored under the names that they have
    state: str = ""  # what the journal notes about the state of the training run

    @property
    def options(self) -> StoreOptions:
        """Return where and how the store is reached."""
        return StoreOptions(self.endpoint_url, self.region, self.profile, self.anonymous)

    def meet(self) -> Ranks:
        """Join the other ranks."""
        timeout_s = self.save_timeout_s if 0 < self.save_timeout_s < float("inf") else 600.0  # `_Save` refuses it
        return Ranks(self.process_group, rank=self.rank, world_size=self.world_size, timeout_s=timeout_s)

    def open_store(self) -> ObjectStore:
        """Open the store of the checkpoint."""
        config = self.config or Config.from_env()
        ref, _ = self.options.resolve(self.uri, new=True)
        return open_folder(ref, self.credentials, config.read_timeout_s)

    def with_files(self, files: ExtraFiles | None, ranks: Ranks) -> Arguments:
        """Return these with the files beside the weights, of rank 0, or with the problems of those."""
        if ranks.rank != 0:
            return self
        try:
            return replace(self, files=read_files(files, config_files(self.model)))
        except SaveRefused as error:
            return replace(self, problems=(str(error),))


class _Agreed(NamedTuple):
    """The tensors of a save on which all ranks agree."""

    stored: dict[str, Any]  # this rank's, as they are stored
    held: HeldTensors
    merged: Merged
    layouts: tuple[ShardLayout, ...]


class _Save:
    """One save of one rank."""

    def __init__(self, ranks: Ranks, given: Arguments, started_s: float) -> None:
        self._ranks = ranks
        self._given = given
        self._started_s = started_s
        self._policy = RetryPolicy()
        self._chunk_bytes = 0
        self._foreign = Peak()
        self._counts: list[_Counts] = []  # of each rank, when the records were last shared
        self._seconds = dict.fromkeys(("plan_s", "exchange_s", "write_s", "commit_s"), 0.0)

    def agree(self, state: Mapping[str, Any]) -> _Agreed:
        """Compare arguments and tensors of all ranks. Raises Agreed with every problem."""
        self._step("plan")
        with self._timed("plan_s"):
            problems = self._argument_problems()
            try:
                stored = dict(state) if self._given.keeps_names else as_stored(state, self._given.model)
            except (SaveRefused, DependencyChanged) as error:
                stored = dict(state)
                problems.append(str(error))
            held = HeldTensors(stored, self._ranks.global_ranks, self._shared_arguments())
            problems += held.table.problems
            merged = self._merge(held.table.model_copy(update={"problems": tuple(dict.fromkeys(problems))}))
            self._compare(merged, held)
            try:
                layouts = lay_out(
                    [tensor.spec for tensor in merged.tensors],
                    revision=new_revision(),
                    max_shard_bytes=self._given.max_shard_bytes,
                    chunk_bytes=self._chunk_bytes,
                )
            except SaveRefused as error:
                raise Agreed(error) from None
        return _Agreed(stored, held, merged, layouts)

    def run(self, state: Mapping[str, Any], reporter: SaveReporter) -> SaveReport:
        """Save. Every rank returns, or every rank raises."""
        _, held, merged, layouts = self.agree(state)
        with contextlib.closing(self._given.open_store()) as store:
            with self._timed("plan_s"):
                plan = schedule(
                    layouts,
                    merged.tensors,
                    self._ranks.size,
                    self._ranks.rank,
                    max(1, self._given.slots // 2),
                    in_order=writes_parts(store).in_order,
                )
            for anew in (False, True):
                self._step("begin")
                layouts, begun = self._begin(store, layouts, anew, reporter)
                writer = CheckpointWriter(
                    store, layouts, begun, policy=self._policy, stored=self._stored_chunks(store, begun)
                )
                reporter.enter(WRITING, functools.partial(self._progress, writer, layouts))
                if self._write(writer, layouts, merged, plan, held, 1 if begun.in_order else self._given.slots):
                    break
            self._step("commit")
            reporter.enter(PUBLISHING)
            with self._timed("commit_s"):
                revision = self._commit(writer, store, begun)
            return self._report(layouts, merged, plan, begun, revision, store.uri)

    def _stored_chunks(self, store: ObjectStore, begun: Begun) -> StoredChunks | None:
        """Return the chunks that the store can copy, if it can. Rank 0 tries that for all."""
        if self._given.since is None or begun.manifest_etag is None:
            return None
        found = stored_chunks(store, self._given.since, self._policy, probe=self._ranks.rank == 0)
        return found if self._ranks.broadcast(b"y" if found else b"n", 0) == b"y" else None

    def _remember(self, store: ObjectStore, saved: tuple[str, str], keep_last: int | None) -> None:
        """Note a save in the history, and remove what is older than `keep_last`. Called on rank 0."""
        if saved[0]:
            remember_save(store, *saved, keep_last, revision_of_file, self._policy)

    def _step(self, name: str) -> None:
        """Note what this rank does now. Raises SaveError if another rank has ended the save."""
        self._ranks.stage(name)
        self._ranks.check()

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] += time.monotonic() - began_s

    def _shared_arguments(self) -> dict[str, str]:
        given = self._given
        return arguments_text(
            uri=given.uri,
            since=given.since,
            save_timeout_s=float(given.save_timeout_s),
            max_shard_bytes=given.max_shard_bytes,
            hash_name=given.hash_name,
            chunk_bytes=self._chunk_bytes,
            slots=given.slots,
        )

    def _argument_problems(self) -> list[str]:
        """Return every problem of this rank's arguments, and note the checked ones."""
        given, ranks = self._given, self._ranks
        found = list(given.problems)
        for name, value, expected in (
            ("rank", given.rank, ranks.rank),
            ("world_size", given.world_size, ranks.size),
        ):
            if value is not None and value != expected:
                found.append(f"{name} is {value}, the process group says {expected}")
        if given.max_shard_bytes < MIN_SHARD_BYTES:
            found.append(f"max_shard_bytes is {given.max_shard_bytes}; it must be at least {MIN_SHARD_BYTES}")
        if given.hash_name not in MANIFEST_HASH_NAMES:
            found.append(f"hash_name must be one of {', '.join(sorted(MANIFEST_HASH_NAMES))}, not {given.hash_name!r}")
        if not 1 <= given.slots <= 1024:
            found.append(f"slots is {given.slots}; it must be from 1 to 1024")
        if not 0 < given.save_timeout_s < float("inf"):
            found.append("save_timeout_s must be a positive number of seconds")
        if given.chunk_bytes is not None and not MIN_CHUNK_BYTES <= given.chunk_bytes <= MAX_CHUNK_BYTES:
            found.append(f"chunk_bytes is {given.chunk_bytes}; it must be from {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}")
        try:
            config = given.config or Config.from_env()
            self._chunk_bytes = given.chunk_bytes or config.chunk_bytes
            ref, only_key = given.options.resolve(given.uri, new=True)
            if only_key is not None:
                found.append("the URI must name a folder, not a file")
            config.source_rules().check(ref, given.credentials)
            if ref.scheme in UNSAVABLE:
                found.append(f"{ref.scheme}:// cannot be saved to: save to an object store or a shared folder")
            elif ref.scheme == "memory" and ranks.size > 1:
                found.append("memory:// is in one process only: save to an object store or a shared folder")
        except LongshoreError as error:
            found.append(str(error))
        if given.since is not None and given.since != "latest" and not REVISION.fullmatch(given.since):
            found.append(
                f'since is {quote(given.since)}; it must be "latest", None or the revision of a save, 64 hex digits'
            )
        if given.keep_last is not None and given.keep_last < 1:
            found.append(f"keep_last is {given.keep_last}; it must be at least 1")
        return found

    def _merge(self, table: RankTable) -> Merged:
        """Exchange the tables: digests first, then each distinct table once. Raises Agreed with every problem."""
        packed = table.pack()
        digest = hashlib.sha256(packed).digest()
        digests = self._ranks.gather(digest)
        distinct = list(dict.fromkeys(digests))
        tables = []
        for one in distinct:
            owner = digests.index(one)
            data = self._ranks.broadcast(packed if owner == self._ranks.rank else b"", owner)
            if hashlib.sha256(data).digest() != one:
                raise SaveError("a table of tensors was damaged on its way", rank=owner)
            tables.append(table if one == digest else RankTable.unpack(data))
        merged = merge(tables, [distinct.index(one) for one in digests])
        if merged.problems:
            raise Agreed(
                SaveRefused(
                    f"this cannot be saved: {'; '.join(merged.problems)}",
                    hint="nothing was written",
                    problems=len(merged.problems),
                )
            )
        return merged

    def _compare(self, merged: Merged, held: HeldTensors) -> None:
        """Raise Agreed with the tensors that are not the same on all ranks that hold the same piece, as samples say."""
        shared = shared_pieces(merged.tensors)
        if not shared:
            return
        digests: dict[tuple[int, ...], list[bytes]] = {}
        for ranks, pieces in shared.items():
            if self._ranks.rank in ranks:
                digests[ranks] = [held.digest(merged.tensors[number], region) for number, region in pieces]
        sums = b"".join(hashlib.sha256(b"".join(each)).digest() for each in digests.values())
        groups = list(shared)
        found = [groups[number] for number in differing(groups, self._ranks.gather(sums), DIGEST_BYTES)]
        if not found:
            return
        pieces_of = [(ranks, number) for ranks in found for number, _ in shared[ranks]]
        mine = b"".join(b"".join(digests[ranks]) for ranks in found if ranks in digests)
        others = differing([ranks for ranks, _ in pieces_of], self._ranks.gather(mine), DIGEST_BYTES)
        problems = Problems(
            drifted(merged.tensors[pieces_of[at][1]].spec.name, groups) for at, groups in others.items()
        )
        raise Agreed(
            SaveRefused(
                f"ranks hold other values of the same tensors, which would be mixed: {problems}",
                hint="nothing was written; broadcast them from one rank, or give plain tensors on one rank only",
                problems=len(problems),
            )
        )

    def _begin(
        self, store: ObjectStore, layouts: Sequence[ShardLayout], anew: bool, reporter: SaveReporter
    ) -> tuple[tuple[ShardLayout, ...], Begun]:
        data = b""
        if self._ranks.rank == 0:
            layouts, begun = begin_save(
                store,
                layouts,
                hash_name=self._given.hash_name,
                chunk_bytes=self._chunk_bytes,
                policy=self._policy,
                anew=anew,
                state=self._given.state,
            )
            data = f"{reporter.save_id}\n{begun.model_dump_json()}".encode()
        save_id, _, data = self._ranks.broadcast(data, 0).partition(b"\n")
        reporter.known_as(save_id.decode("ascii", "replace"))
        try:
            begun = Begun.model_validate_json(data)
        except ValidationError as error:
            raise SaveError("rank 0 began the save with an unreadable message", rank=0) from error
        return renamed(layouts, begun.revision), begun

    def _write(
        self,
        writer: CheckpointWriter,
        layouts: Sequence[ShardLayout],
        merged: Merged,
        plan: Schedule,
        held: HeldTensors,
        threads: int,
    ) -> bool:
        """Write every part. Return False, on every rank, if the save must begin anew."""
        slots = Slots(self._given.slots, plan, layouts, pinned=held.any_on_gpu)
        exchange = Exchange(self._ranks, layouts, merged, held, self._foreign)
        differs = threading.Event()
        pending: list[Future[None]] = []

        def put(part: PlannedPart, buffer: torch.Tensor, foreign_bytes: int) -> None:
            place = layouts[part.shard].parts[part.part]
            data: Any = buffer.numpy()  # which has the buffer protocol
            try:
                if not differs.is_set():
                    writer.write(part.shard, place.start, memoryview(data)[: place.size_bytes])
            except PartsDiffer:
                differs.set()
            finally:
                self._foreign.add(-foreign_bytes)
                slots.give(buffer)

        with ThreadPoolExecutor(threads, "save-write") as pool:
            try:
                for number, work in enumerate(plan.rounds):
                    self._step(f"round {number + 1} of {len(plan.rounds)}")
                    with self._timed("exchange_s"):
                        buffers = [slots.take(self._ranks.check) for _ in work.assemble]
                        foreign = exchange.run(work, buffers)
                    for part, buffer, count in zip(work.assemble, buffers, foreign, strict=True):
                        pending.append(pool.submit(put, part, buffer, count))
                    pending = [future for future in pending if not _is_done(future)]
                    if (number + 1) % ROUNDS_PER_GATHER == 0 and not self._share(writer, differs):
                        return False
                self._step("write")
                with self._timed("write_s"):
                    while pending:
                        self._ranks.check()
                        with contextlib.suppress(TimeoutError):
                            pending[0].result(timeout=0.2)
                        pending = [future for future in pending if not _is_done(future)]
                return self._share(writer, differs)
            finally:
                differs.set()  # what still waits is not written when this ends early

    def _share(self, writer: CheckpointWriter, differs: threading.Event) -> bool:
        """Give rank 0 the records of written parts, and all ranks the counts. Return False if one must begin anew."""
        mine = _COUNTS.pack(*self._count(writer)) + (b"!" if differs.is_set() else b".")
        answers = self._ranks.gather(mine + _RECORDS.dump_json(tuple(writer.take_records())))
        self._counts = [_Counts.load(answer) for answer in answers]
        answers = [answer[_COUNTS.size :] for answer in answers]
        if any(answer[:1] != b"." for answer in answers):
            self._counts = []  # another writer counts from 0
            return False
        if self._ranks.rank == 0:
            try:
                records = [record for answer in answers for record in _RECORDS.validate_json(answer[1:])]
            except ValidationError as error:
                raise SaveError("a rank sent unreadable records of its parts") from error
            writer.note(records)
        return True

    def _count(self, writer: CheckpointWriter) -> _Counts:
        return _Counts(writer.written_bytes, writer.reused_bytes, writer.copied_bytes, self._foreign.peak_bytes)

    def _progress(self, writer: CheckpointWriter, layouts: Sequence[ShardLayout]) -> dict[str, int]:
        """Return what all ranks have done: this rank now, the others when they last shared their counts."""
        counts = [self._count(writer), *(count for rank, count in enumerate(self._counts) if rank != self._ranks.rank)]
        return {"total_bytes": sum(layout.size_bytes for layout in layouts), **_Counts.of_all(counts)._asdict()}

    def _commit(self, writer: CheckpointWriter, store: ObjectStore, begun: Begun) -> str:
        """Publish. The other ranks hear of the revision when rank 0 is done with all of it."""

        def on_step(step: str) -> None:
            if step in _VISIBLE_HINTS:
                self._ranks.note_visible(_VISIBLE_HINTS[step])
            self._step(f"commit: {step}")

        data = b""
        if self._ranks.rank == 0:
            self._remember(store, (begun.replaces_save, begun.replaces_state), None)
            manifest = writer.commit(extra_files=self._given.files, on_step=on_step)
            data = manifest.revision.encode()
            state = next((found[1] for name in self._given.files if (found := LINK_KEY.fullmatch(name))), "")
            self._remember(store, (begun.revision, state), self._given.keep_last)
        return self._ranks.broadcast(data, 0).decode("ascii", "replace")

    def _report(
        self,
        layouts: Sequence[ShardLayout],
        merged: Merged,
        plan: Schedule,
        begun: Begun,
        revision: str,
        uri: str,
    ) -> SaveReport:
        total = _Counts.of_all(self._counts)
        return SaveReport(
            uri=uri,
            revision=revision,
            save_id=begun.revision,
            rank=self._ranks.rank,
            world_size=self._ranks.size,
            shards=len(layouts),
            tensors=len(merged.tensors),
            tied=merged.ties,
            size_bytes=sum(layout.size_bytes for layout in layouts),
            written_bytes=total.written_bytes,
            reused_bytes=total.reused_bytes,
            copied_bytes=total.copied_bytes,
            moved_bytes=plan.moved_bytes,
            peak_foreign_bytes=total.peak_foreign_bytes,
            elapsed_s=time.monotonic() - self._started_s,
            **self._seconds,
        )


def _is_done(future: Future[None]) -> bool:
    """Return whether a part is written. Raises what its writer raised."""
    if future.done():
        future.result()
    return future.done()


class _Counts(NamedTuple):
    """The bytes that one rank counted, or all of them."""

    written_bytes: int
    reused_bytes: int
    copied_bytes: int
    peak_foreign_bytes: int

    @staticmethod
    def load(data: bytes) -> _Counts:
        """Return the counts at the begin of a rank's message. Raises SaveError."""
        try:
            return _Counts(*_COUNTS.unpack_from(data))
        except struct.error as error:
            raise SaveError("a rank sent unreadable counts of its parts") from error

    @staticmethod
    def of_all(ranks: Sequence[_Counts]) -> _Counts:
        """Return the sums over ranks; of the peak the highest."""
        written, reused, copied, peaks = zip(*ranks, strict=True)
        return _Counts(sum(written), sum(reused), sum(copied), max(peaks))
