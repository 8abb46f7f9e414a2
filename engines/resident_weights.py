"""The weights of a running engine, exchanged in place for those of another revision.

    load     load_weights(lazy tensors) --Watch--> which checkpoint tensors are written into which parameter
             templates of the parameters, before the engine repacks them
    update   digests of both revisions --> changed tensors --> modules that hold them
             1. stage: new parameters beside those modules, with a copy of what did not change, filled by the engine's
                own load_weights, verified
             2. all ranks agree
             3. exchange: copied into the live parameters; a module that packs its weights packs the new ones

The parameters of a module belong together, because an engine packs a module as a whole. So all of them are staged when
one has changed. A tensor that did not change is copied from the live parameter. It is read again where that cannot be:
when the engine has packed the parameter away, or when two tensors wrote to the same place in it. Until the exchange,
nothing of the live model is touched: the staged parameters stand in their modules only while `load_weights` runs, when
the engine computes nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch

from actors.reader.lazy_tensor import assignments_read
from actors.reader.open_model import OpenModel
from cluster.errors import DoesNotFit, ModelBroken, UpdateFailed, UpdateRefused
from cluster.small_files import ModelSource
from engines.filling import Weights
from engines.written_weights import Watch, spanned
from storage.checkpoints.model_index import ModelIndex
from storage.errors import LongshoreError
from storage.host.memory import available_host_bytes
from storage.host.processes import pid_namespace
from storage.problems import Problems, quote

_ATTRIBUTE = "_longshore_weights"  # of a model: its ResidentWeights
_PACKED_COPY = "cpu_linear"  # vLLM's attribute of a module that has a packed copy beside its weights
HEADROOM_BYTES = 256 << 20  # of host memory that must stay free

LoadWeights = Callable[[Weights], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """A parameter as the engine made it, before it was filled and packed. Without its memory."""

    kind: type
    attributes: Mapping[str, Any]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def size_bytes(self) -> int:
        """Return the bytes from its first element to its last."""
        return self.dtype.itemsize * spanned(self.shape, self.stride)

    def make(self) -> torch.nn.Parameter:
        """Return a parameter like it, with memory of its own."""
        data = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        made: torch.nn.Parameter = torch.Tensor._make_subclass(self.kind, data, False)
        made.__dict__.update(self.attributes)
        return made


@dataclass(slots=True, eq=False)
class Slot:
    """A parameter of the model and the places where it stands: more than one when it is tied."""

    name: str
    template: Template
    owners: list[tuple[torch.nn.Module, str]]
    sources: frozenset[str]  # tensors of the checkpoint that are written into it
    is_apart: bool  # each of them in a range of its own, so that one can be replaced without the others

    def live(self) -> torch.Tensor | None:
        """Return the parameter of the running model, or None if the engine has packed it away."""
        owner, name = self.owners[0]
        found = owner._parameters.get(name)
        return found if found is not None and _is_like(found, self.template) else None


@dataclass(slots=True, eq=False)
class Staged:
    """New parameters that wait for the exchange."""

    slots: list[Slot]
    parameters: list[torch.nn.Parameter]

    @property
    def size_bytes(self) -> int:
        """Return the memory that they take."""
        return sum(slot.template.size_bytes for slot in self.slots)


@dataclass(frozen=True, slots=True)
class EngineUpdateReport:
    """The result of an update of an engine. Bytes are those of all its processes."""

    revision: str
    tensors: int  # of the checkpoint
    changed_tensors: int  # that differ, or all if the revision before is not known
    staged_bytes: int  # that each process staged at one time, at most
    read_bytes: int  # without those of a process that could not count them, as the host of its arena had ended
    store_bytes: int  # that left the store, once for each machine; in the same way
    total_s: float

    def __str__(self) -> str:
        return (
            f"revision {self.revision[:12]} in {self.total_s:.2f} s: {self.changed_tensors} of {self.tensors} tensors "
            f"changed, {self.staged_bytes} bytes staged, {self.read_bytes} read, {self.store_bytes} from the store"
        )


class ResidentWeights:
    """What an update has to know of a model that Longshore has filled."""

    def __init__(self, model: torch.nn.Module, watch: Watch, source: ModelSource, index: ModelIndex) -> None:
        """Describe the model after `load_weights`, and before the engine repacks anything."""
        self.source = source  # of the contents that the model has
        self.index = index  # of the revision that the model has
        self.broken = ""  # why it is not known which revision the model has: an update then reads everything
        self.staging = False  # whether the engine's loader fills staged parameters
        self._model = model
        self._packing: set[int] = set()  # modules that the engine packs, by id
        self.slots = _slots(model, watch)
        self.unknown = [slot.name for slot in self.slots if not slot.sources or "" in slot.sources]
        # What was read and is in no parameter may be anywhere: in an attribute of a module, or in a number.
        self.elsewhere = watch.read.difference(*(slot.sources for slot in self.slots))
        # The contents of a checkpoint in a buffer would stay old.
        self.unknown += [name for name, buffer in model.named_buffers() if _storage(buffer) in watch.written]

    @staticmethod
    def attach(model: torch.nn.Module, watch: Watch, source: ModelSource, index: ModelIndex) -> None:
        """Keep the description with the model. Who calls the model's `load_weights` later is noticed."""
        is_watched = _ATTRIBUTE in model.__dict__
        model.__dict__[_ATTRIBUTE] = ResidentWeights(model, watch, source, index)
        if is_watched:
            return
        load_weights: Any = model.load_weights

        @wraps(load_weights)
        def noticed(*args: Any, **kwargs: Any) -> Any:
            if not ResidentWeights.of(model).staging:
                ResidentWeights.reloaded(model)
            return load_weights(*args, **kwargs)

        model.__dict__["load_weights"] = noticed

    @staticmethod
    def reloaded(model: torch.nn.Module, source: ModelSource | None = None) -> None:
        """Note that somebody else writes or discards the model's weights: an update then reads everything.

        `source`: where the new ones are, if it is known.
        """
        found = model.__dict__.get(_ATTRIBUTE)
        if isinstance(found, ResidentWeights):
            found.broken = "its weights were loaded again"
            found.source = source or found.source

    @staticmethod
    def of(model: torch.nn.Module) -> ResidentWeights:
        """Return the description of a model. Raises UpdateRefused if Longshore did not fill it."""
        found = model.__dict__.get(_ATTRIBUTE)
        if not isinstance(found, ResidentWeights):
            raise UpdateRefused(
                "the engine's weights were not loaded by Longshore, or from several places",
                hint="start the engine with Longshore's load format",
            )
        return found

    def check_updatable(self, new: ModelIndex, unknown_packing: Callable[[torch.nn.Module], bool]) -> None:
        """Raise UpdateRefused, with every reason, unless the model can take that revision in place.

        `unknown_packing`: whether the engine changes a module's weights after it was filled, in a way that `exchange`
        does not repeat.
        """
        problems = Problems()
        if self.unknown:
            problems.add(f"parameters were filled in ways that are not known: {Problems(map(quote, self.unknown))}")
        if rearranged := [slot.name for slot in self.slots if _is_rearranged(slot)]:
            problems.add(f"the engine has changed the strides of {Problems(map(quote, rearranged))}")
        modules = {type(module).__name__ for module in self._model.modules() if unknown_packing(module)}
        if modules:
            problems.add(f"the engine repacks the weights of {', '.join(sorted(modules))} in a way that is not known")
        before = {tensor.name: (tensor.dtype, tensor.shape) for tensor in self.index.tensors}
        after = {tensor.name: (tensor.dtype, tensor.shape) for tensor in new.tensors}
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                problems.add(f"{quote(name)} differs in more than contents")
        if self.elsewhere and (stale := self.elsewhere & self.changed(new)):
            problems.add(f"the engine keeps contents of {Problems(map(quote, sorted(stale)))} outside its parameters")
        if problems:
            raise UpdateRefused(
                f"this revision cannot be taken in place: {problems}",
                hint="start the engine anew",
                uri=self.source.model_uri,
            )

    def changed(self, new: ModelIndex) -> set[str]:
        """Return the names of tensors that an update to this revision has to read."""
        return {tensor.name for tensor in new.tensors} if self.broken else changed_tensors(self.index, new)

    def affected(self, changed: Collection[str]) -> list[list[Slot]]:
        """Return the slots that an update replaces, in groups that can be exchanged one after the other.

        A slot is replaced with all of its module. What a tensor is written into belongs together, too.
        """
        group = {id(slot): number for number, slot in enumerate(self.slots)}

        def join(slots: Sequence[Slot]) -> None:
            numbers = {group[id(slot)] for slot in slots}
            for slot in self.slots:
                if group[id(slot)] in numbers:
                    group[id(slot)] = min(numbers)

        by_module: dict[int, list[Slot]] = {}
        by_source: dict[str, list[Slot]] = {}
        for slot in self.slots:
            for owner, _ in slot.owners:
                by_module.setdefault(id(owner), []).append(slot)
            for source in slot.sources:
                by_source.setdefault(source, []).append(slot)
        for slots in (*by_module.values(), *by_source.values()):
            if len(slots) > 1:
                join(slots)
        hit = {group[id(slot)] for slot in self.slots if not slot.sources.isdisjoint(changed)}
        return [[slot for slot in self.slots if group[id(slot)] == number] for number in sorted(hit)]

    def stage(
        self,
        slots: Sequence[Slot],
        changed: Collection[str],
        lazy: Iterable[tuple[str, Any]],
        load_weights: LoadWeights,
    ) -> Staged:
        """Read new parameters, verified, by the engine's own loader. The live ones are as before when this returns.

        Raises what reading raises, and UpdateRefused if the engine fills them in another way than before.
        """
        staged = Staged(list(slots), [slot.template.make() for slot in slots])
        names: set[str] = set()  # that are read
        for slot, parameter in zip(staged.slots, staged.parameters, strict=True):
            known = slot.live() if slot.is_apart else None
            names |= slot.sources if known is None else slot.sources.intersection(changed)
            if known is not None and not slot.sources.issubset(changed):
                parameter.data.copy_(known.data)
        live = map(_storage, itertools.chain(self._model.parameters(), self._model.buffers()))
        watch = Watch([address for address in live if address])
        with self._is_staging(), _standing_in(staged), assignments_read(), watch:
            load_weights(watch.named((name, tensor) for name, tensor in lazy if name in names))
            for slot, parameter in zip(staged.slots, staged.parameters, strict=True):
                owner, name = slot.owners[0]
                now = owner._parameters[name]
                written = watch.written.get(parameter.untyped_storage().data_ptr(), {})
                if now is not parameter or written.keys() != slot.sources & names:
                    raise UpdateRefused(
                        f"the engine filled {quote(slot.name)} in another way than when it was loaded",
                        hint="start the engine anew",
                        uri=self.source.model_uri,
                    )
        return staged

    @contextlib.contextmanager
    def _is_staging(self) -> Iterator[None]:
        self.staging = True
        try:
            yield
        finally:
            self.staging = False

    def host_bytes(self, slots: Collection[Slot]) -> int:
        """Return the host memory that staging and exchanging these slots takes.

        A module is packed while its old packed weights and everything that was staged are still there.
        """
        here = [slot for slot in slots if slot.template.device.type == "cpu"]
        packed: Counter[int] = Counter()
        for slot in here:
            for owner, _ in slot.owners:
                packed[id(owner)] += slot.template.size_bytes * (slot.live() is None or self._is_packed(owner))
        return sum(slot.template.size_bytes for slot in here) + max(packed.values(), default=0)

    def _is_packed(self, module: torch.nn.Module) -> bool:
        return id(module) in self._packing or hasattr(module, _PACKED_COPY)

    @torch.no_grad()
    def exchange(self, staged: Staged, repack: Callable[[torch.nn.Module], object]) -> None:
        """Put staged parameters in the place of the live ones. Memory of live parameters stays where it is.

        `repack`: packs a module whose parameters were put into it as they were before the engine packed them.
        """
        owners = {id(owner): owner for slot in staged.slots for owner, _ in slot.owners}
        for slot, parameter in zip(staged.slots, staged.parameters, strict=True):
            for owner, name in slot.owners:
                live = owner._parameters.get(name)
                if live is not None and _is_like(live, slot.template):
                    if live.data_ptr() != parameter.data_ptr():
                        live.data.copy_(parameter.data)
                else:  # the engine has packed it away
                    owner._parameters[name] = parameter
                    self._packing.add(id(owner))
        for owner in owners.values():
            if self._is_packed(owner):
                repack(owner)


@dataclass(slots=True, eq=False)
class Update:
    """The update of one rank: `prepare` on all ranks, then `exchange` on all ranks, then `finish`."""

    resident: ResidentWeights
    opened: OpenModel  # the new revision
    source: ModelSource  # of it
    load_weights: LoadWeights
    repack: Callable[[torch.nn.Module], object]
    streaming: bool
    changed: set[str] = field(default_factory=set)
    staged_bytes: int = 0  # at most, at one time
    host_bytes: int = 0  # of host memory that ranks of this machine take at one time
    _batches: list[list[Slot]] = field(default_factory=list)  # exchanged one after the other
    _staged: Staged | None = None

    def plan(self, place: str) -> Vote:
        """Find out what changed, and say what this rank is about to do. `place` names its machine."""
        new = self.opened.index
        self.changed = self.resident.changed(new)
        groups = self.resident.affected(self.changed)
        self._batches = groups if self.streaming else [[slot for group in groups for slot in group]]
        need = max(map(self.resident.host_bytes, self._batches), default=0)
        return Vote(
            f"{self.source.model_uri} at revision {new.revision}{', streaming' if self.streaming else ''}", place, need
        )

    def check_room(self) -> None:
        """Raise DoesNotFit unless there is room for all ranks of this machine. None of them has begun."""
        hint = "free memory there"
        if not self.streaming:
            hint += ", or update with streaming=True, which stages one module after the other"
        for batch in self._batches:
            check_room(batch, self.host_bytes, "Nothing was touched", hint)

    def prepare(self) -> None:
        """Stage everything that changed. A streaming update stages in its exchange."""
        if not self.streaming:
            self._staged = self._stage(self._batches[0])

    def exchange(self) -> None:
        """Put the new contents into the live model."""
        self.resident.broken = f"an update to revision {self.opened.revision[:12]} did not end"
        if self._staged is not None:
            self.resident.exchange(self._staged, self.repack)
            self._staged = None
            return
        for batch in self._batches:
            # Other ranks of the machine may have taken their part already, so only this rank's is to be free.
            check_room(
                batch,
                self.resident.host_bytes(batch),
                "The exchange has begun, so the model may have contents of both revisions",
                "free memory there and update again, which reads everything, or start the engine anew",
            )
            self.resident.exchange(self._stage(batch), self.repack)

    def finish(self) -> None:
        """Note that the model has the new revision."""
        self.resident.broken = ""
        self.resident.index, self.resident.source = self.opened.index, self.source

    def _stage(self, slots: Sequence[Slot]) -> Staged:
        staged = self.resident.stage(slots, self.changed, self.opened.lazy_tensors(), self.load_weights)
        self.staged_bytes = max(self.staged_bytes, staged.size_bytes)
        return staged


@dataclass(frozen=True, slots=True)
class Vote:
    """The message of one rank to all others after a step of an update."""

    what: str = ""  # what it is about to do; the same on all ranks
    place: str = ""  # names the machine, or what of it shares memory
    host_bytes: int = 0  # of host memory that it will take at one time
    # in the end, what it has taken and read, and what left the store for all ranks of its machine
    staged_bytes: int = 0
    read_bytes: int = 0
    store_bytes: int = 0
    error: str = ""


def together(group: Any, ranks: int, step: Callable[[], Vote | None], *, exchanges: bool) -> list[Vote]:
    """Do one step of an update, and tell all ranks how it ended here. Raise if it failed anywhere.

    Every rank calls it for each step, whatever happened to it before. Ranks that were asked for different revisions, or
    of which one has missed a call, find it out here.

    Args:
        group: A process group that works with host memory.
        ranks: Number of ranks in it.
        step: What this rank has to do.
        exchanges: Whether the step changes the live model. Otherwise a failure leaves the old revision everywhere.

    Returns:
        The votes of all ranks, in their order.

    Raises:
        UpdateFailed: Another rank failed, is gone, or was asked for something else, before the exchange.
        ModelBroken: Some rank failed, or is gone, in the exchange. `updated_ranks` lists the ranks that are known to
            have all of the new revision.
    """
    error, vote = None, Vote()
    try:
        vote = step() or vote
    except Exception as failure:
        error, vote = failure, Vote(error=text_of(failure))
    votes = [vote] * ranks
    if ranks > 1:
        try:
            torch.distributed.all_gather_object(votes, vote, group=group)
        except (RuntimeError, ValueError) as gone:
            if not exchanges:
                raise UpdateFailed("a rank is gone. This one has the revision that it had") from gone
            own = [] if error is not None else [torch.distributed.get_rank(group)]
            state = "all of the new revision" if own else "contents of both revisions"
            raise ModelBroken(
                f"a rank is gone. This one has {state}", hint="start the engine anew", updated_ranks=own
            ) from gone
    failed = [rank for rank, one in enumerate(votes) if one.error]
    if not failed:
        if len(asked := {one.what for one in votes}) > 1:
            raise UpdateFailed(
                f"ranks were asked for different things, so nothing was touched: {'; '.join(sorted(asked))}",
                hint="pass revision=, and update again",
            )
        return votes
    if not exchanges:
        if error is not None:
            raise error
        raise UpdateFailed(f"rank {failed[0]} of {ranks} failed, so nothing was touched: {votes[failed[0]].error}")
    updated = [rank for rank, one in enumerate(votes) if not one.error]
    raise ModelBroken(
        f"rank {failed[0]} failed in the exchange: {votes[failed[0]].error}. "
        f"Ranks with all of the new revision: {updated}",
        hint="update again, which reads everything, or start the engine anew",
        updated_ranks=updated,
    ) from error


_SENT: dict[str, type[LongshoreError]] = {kind.__name__: kind for kind in (DoesNotFit, ModelBroken, UpdateRefused)}


def text_of(error: BaseException) -> str:
    """Return an error as the text from which `error_of` makes one of the same type."""
    return f"{type(error).__name__}: {error}"


def error_of(text: str) -> LongshoreError:
    """Return the error of an update, of which an engine passes on only a text that has its type's name in it.

    Ranks that did not fail themselves name the type of the rank that did. A text that names none is an UpdateFailed.
    """
    found = re.search(rf"\b({'|'.join(_SENT)}): ", text)
    kind: type[LongshoreError] = UpdateFailed if found is None else _SENT[found[1]]
    details: dict[str, Any] = {}
    if updated := re.search(r" \(updated_ranks=\[([\d, ]*)\]\)", text):
        details["updated_ranks"] = [int(rank) for rank in re.findall(r"\d+", updated[1])]
        text = text.replace(updated[0], "")
    return kind(f"the engine's update failed: {text}", **details)


def take_together(
    begin: Callable[[], contextlib.AbstractContextManager[Update]], group: Any, ranks: int, log: logging.Logger
) -> EngineUpdateReport:
    """Take a new revision on every rank of an engine, or on none. Every rank calls it.

    Args:
        begin: Opens the new revision, and yields this rank's update.
        group: A process group of all ranks that works with host memory.
        ranks: Number of ranks in it.
        log: Gets a line about what the update has cost.

    Returns:
        What the update did on all ranks.

    Raises:
        UpdateRefused: The revision differs in more than contents, or the engine repacks weights in an unknown way.
        DoesNotFit: There is no room to stage what changed.
        UpdateFailed: Another rank failed before the exchange. Every rank has the revision that it had.
        ModelBroken: A rank failed later. The message says which ranks have the new revision.
        LongshoreError: A read failed. Every rank has the revision that it had.
    """
    begin_s = time.monotonic()
    place = pid_namespace()
    with contextlib.ExitStack() as stack:
        begun: list[Update] = []

        def left_if_failed(step: Callable[[], Vote | None]) -> Vote | None:
            try:
                return step()
            except BaseException:
                stack.close()  # other ranks here need not wait for this reader
                raise

        def plan() -> Vote:
            begun.append(stack.enter_context(begin()))
            return begun[0].plan(place)

        votes = together(group, ranks, lambda: left_if_failed(plan), exchanges=False)
        (update,) = begun
        update.host_bytes = bytes_here(votes, place)
        for step in (update.check_room, update.prepare):  # no rank stages before all have looked
            together(group, ranks, partial(left_if_failed, step), exchanges=False)

        def exchange() -> Vote:
            update.exchange()
            try:
                read = update.opened.report()
            except LongshoreError as error:  # the arena's host has ended, and everything had been read before
                log.warning("It is not known what the update has read: %s", error)
                read = {"read_bytes": 0, "store_bytes": 0}
            return Vote(
                place=place,
                staged_bytes=update.staged_bytes,
                read_bytes=read["read_bytes"],
                store_bytes=read["store_bytes"],
            )

        votes = together(group, ranks, exchange, exchanges=True)
        update.finish()
    store_bytes: dict[str, int] = {}  # by machine: the last rank of it to end has counted all
    for vote in votes:
        store_bytes[vote.place] = max(store_bytes.get(vote.place, 0), vote.store_bytes)
    report = EngineUpdateReport(
        revision=update.opened.revision,
        tensors=len(update.opened),
        changed_tensors=len(update.changed),
        staged_bytes=sum(vote.staged_bytes for vote in votes),
        read_bytes=sum(vote.read_bytes for vote in votes),
        store_bytes=sum(store_bytes.values()),
        total_s=time.monotonic() - begin_s,
    )
    log.info("Updated to %s", report)
    return report


def pack(module: torch.nn.Module) -> None:
    """Pack the weights of a module, as vLLM and SGLang do after a load."""
    method = getattr(module, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(module)


def bytes_here(votes: Iterable[Vote], place: str) -> int:
    """Return the host memory that the ranks of one machine stage together."""
    return sum(vote.host_bytes for vote in votes if vote.place == place)


def changed_tensors(old: ModelIndex, new: ModelIndex) -> set[str]:
    """Return the names of tensors whose bytes may differ: those with a chunk of another digest.

    All, if one of the revisions was not published, or their digests cannot be compared.
    """
    names = {tensor.name for tensor in new.tensors}
    if old.chunks.digests is None or new.chunks.digests is None or old.chunks.hash_name != new.chunks.hash_name:
        return names
    before = _contents(old)
    return {name for name, contents in _contents(new).items() if before.get(name) != contents}


def _contents(index: ModelIndex) -> dict[str, tuple[tuple[int, int, bytes | None], ...]]:
    """Return for each tensor where its chunks begin, from its first byte, their sizes and digests."""
    chunks = index.chunks
    found: dict[str, tuple[tuple[int, int, bytes | None], ...]] = {}
    row = 0
    for tensor in index.tensors:  # in the order of the chunks
        while row < len(chunks) and (int(chunks.shard[row]), int(chunks.end[row])) <= (tensor.shard, tensor.start):
            row += 1
        at, rows = row, []
        while at < len(chunks) and int(chunks.shard[at]) == tensor.shard and int(chunks.start[at]) < tensor.end:
            start, end = int(chunks.start[at]), int(chunks.end[at])
            rows.append((start - tensor.start, end - start, chunks.digest(at)))
            at += 1
        found[tensor.name] = tuple(rows)
    return found


def _slots(model: torch.nn.Module, watch: Watch) -> list[Slot]:
    found: dict[int, Slot] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.numel():
                continue
            if id(parameter) not in found:
                template = Template(
                    type(parameter),
                    dict(parameter.__dict__),
                    tuple(parameter.shape),
                    parameter.stride(),
                    parameter.dtype,
                    parameter.device,
                )
                written = watch.written.get(parameter.untyped_storage().data_ptr(), {})
                ranges = sorted(written.values())
                is_apart = all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
                path = f"{prefix}.{name}" if prefix else name
                found[id(parameter)] = Slot(path, template, [], frozenset(written), is_apart)
            found[id(parameter)].owners.append((module, name))
    return list(found.values())


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of its memory, or 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.numel() else 0


def _is_like(parameter: torch.Tensor, template: Template) -> bool:
    """Return whether new contents can be copied into it: the engine has not packed it away."""
    return (parameter.shape, parameter.dtype, parameter.device) == (template.shape, template.dtype, template.device)


def _is_rearranged(slot: Slot) -> bool:
    """Return whether the engine has changed the order in memory of a parameter's elements since it was filled."""
    live = slot.live()
    if live is None:
        return False
    # Strides of dimensions with one element mean nothing.
    steps = zip(live.shape, live.stride(), slot.template.stride, strict=True)
    return any(now != before for count, now, before in steps if count > 1)


@contextlib.contextmanager
def _standing_in(staged: Staged) -> Iterator[None]:
    """Put staged parameters into their modules, and what was there back afterwards."""
    before = [
        (owner, name, owner._parameters[name], parameter)
        for slot, parameter in zip(staged.slots, staged.parameters, strict=True)
        for owner, name in slot.owners
    ]
    try:
        for owner, name, _, parameter in before:
            owner._parameters[name] = parameter
        yield
    finally:
        for owner, name, was, _ in before:
            owner._parameters[name] = was


def check_room(slots: Sequence[Slot], host_bytes: int, state: str, hint: str) -> None:
    """Raise DoesNotFit unless there is memory for new parameters on each device.

    `host_bytes`: how much of host memory has to be free. `state` and `hint`: for the message.
    """
    for device in {slot.template.device for slot in slots}:
        if device.type == "cuda":
            need = sum(slot.template.size_bytes for slot in slots if slot.template.device == device)
            free, _ = torch.cuda.mem_get_info(device)
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        else:
            need, free = host_bytes, available_host_bytes() - HEADROOM_BYTES
        if need > free:
            raise DoesNotFit(
                f"the update needs {need} bytes on {device}, and {max(free, 0)} are free. {state}",
                hint=hint,
                needed_bytes=need,
                free_bytes=max(free, 0),
            )
