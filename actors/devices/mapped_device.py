"""Several devices of one rank (a device map) as one device: GPUs, host memory and files on disk.

    read items of a chunk --by segment--> cuda:0 | cuda:1 | cpu | disk        each has segments of its own, from 0 on

The plan assigns each segment to exactly one device.

`OffloadFolder` is the folder for tensors on disk. One rank writes it and then maps it. Its format is Accelerate's.

    open: locked, leftovers removed, files created --> write --> seal: on disk, index.json --> readable
       `--> remove: nothing of it is left  <-----------------------------------------'

The folder is new or empty. Its file `.longshore` is locked as long as a worker uses the folder, and lists the tensors
that have files there. The lock ends with its process. The next load then removes the files on that list, and no
others. Files are opened by name below the folder's own descriptor, never through a link. So no tensor's name can make
a worker touch anything outside the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actors.devices.device import Device, OpeningDevice
from cluster.errors import ConfigError, DeviceUnavailable, DoesNotFit, PlanError
from cluster.fit.device_map import CPU, DISK, DeviceKey, device_name, device_order
from cluster.fit.options import INDEX_NAME, index_entry, offload_name
from cluster.messages import RankJob
from cluster.planning.plan import RankPlan, SliceTable, StagedTensor, TensorSlice
from cluster.planning.read_items import ReadItems
from storage.problems import quote

if TYPE_CHECKING:
    import torch


LOCK_NAME = ".longshore"
LOCK_TITLE = "files of longshore, which may be removed when no process locks this one; used by "
SAME_LOAD_S = 30.0  # wait for a killed worker, which this one replaces, to end
OTHER_LOAD_S = 5.0  # wait for a load that was just released to end
LOCK_EVERY_S = 0.1
TRIES = 5  # to open a folder that another load may remove at the same time
_PRIVATE = 0o600
_MOST_LIST_BYTES, _MOST_TITLE_BYTES = 64 << 20, 4096
_FULL = (errno.ENOSPC, errno.EDQUOT)


class OffloadFolder:
    """Files of one rank. Not thread-safe, but different threads may write different files."""

    def __init__(self, path: str, owner: str) -> None:
        """`owner`: one line of text that names the load and rank of the files."""
        self.path = path
        self._owner = owner
        self._folder: int | None = None  # descriptor
        self._lock: int | None = None  # descriptor of the locked file
        self._made = False
        self._sizes: dict[str, int] = {}  # of the files that were created

    @property
    def size_bytes(self) -> int:
        """Bytes of the files that were created."""
        return sum(self._sizes.values())

    def open(self, sizes: Mapping[str, int]) -> None:
        """Lock the folder and create each tensor's file with its size, so that its space is reserved.

        Raises:
            ConfigError: The folder cannot be used, or another load uses it.
            DoesNotFit: The disk is too small.
            PlanError: A tensor's name cannot be a file name.
        """
        need_bytes = sum(sizes.values())
        for tensor in sizes:
            if offload_name(tensor) is None:
                raise PlanError(f"the name of the tensor {quote(tensor)} cannot be a file name")
        with _refused(self.path, need_bytes):
            lock = self._take_folder()
            space = os.fstatvfs(lock)
            free_bytes = space.f_bavail * space.f_frsize
            if need_bytes > free_bytes:
                raise DoesNotFit(
                    "the disk of the offload folder is too small",
                    need_bytes=need_bytes,
                    free_bytes=free_bytes,
                    path=self.path,
                )
            self._list(sizes, lock)
            for tensor, size_bytes in sizes.items():
                self._create(tensor, size_bytes)

    def write(self, tensor: str, data: memoryview, offset: int) -> None:
        """Write bytes of the tensor from `offset` on. Raises ConfigError, DoesNotFit."""
        with _refused(self.path, len(data)), self._file(f"{tensor}.dat", os.O_WRONLY) as descriptor:
            while len(data):
                written = os.pwrite(descriptor, data, offset)
                data, offset = data[written:], offset + written

    def seal(self, index: Mapping[str, object]) -> None:
        """Write the index, and return when it and all files are on the disk. Raises ConfigError, DoesNotFit."""
        text = json.dumps(index, indent=2).encode()
        with _refused(self.path, len(text)):
            for tensor in self._sizes:
                with self._file(f"{tensor}.dat", os.O_RDONLY) as descriptor:
                    os.fsync(descriptor)
            with self._file(f"{INDEX_NAME}.part", os.O_CREAT | os.O_EXCL | os.O_WRONLY) as descriptor:
                _write_all(descriptor, text)
            os.rename(f"{INDEX_NAME}.part", INDEX_NAME, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
            os.fsync(self._descriptor)  # makes the file names durable, too

    @contextlib.contextmanager
    def readable(self, tensor: str) -> Iterator[str]:
        """Yield a path at which exactly the tensor's file can be opened.

        Raises ConfigError, also when the system refuses a call in the block.
        """
        with _refused(self.path, 0), self._file(f"{tensor}.dat", os.O_RDONLY) as descriptor:
            yield f"/proc/self/fd/{descriptor}"

    def remove(self) -> None:
        """Remove this rank's files, and the folder if this object made it. Never raises. Idempotent.

        Existing mappings of a file keep its bytes.
        """
        if self._lock is not None:
            for name in (*_names(self._sizes), LOCK_NAME):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._folder)
        if self._made:
            self._made = False
            with contextlib.suppress(OSError):  # it may hold files of others
                os.rmdir(self.path)
        for descriptor in (self._lock, self._folder):
            if descriptor is not None:
                os.close(descriptor)
        self._lock = self._folder = None

    # -- inside ------------------------------------------------------------------------------------------------

    def _take_folder(self) -> int:
        """Open or make the folder and lock it. Return the locked descriptor."""
        for _ in range(TRIES):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
                self._made = True
            with contextlib.suppress(FileNotFoundError):  # the load that was just released has removed its folder
                self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                self._lock = self._take()
                return self._lock
            if self._folder is not None:
                os.close(self._folder)
                self._folder = None
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)

    def _take(self) -> int:
        """Lock the folder and remove the files that a dead worker left. Return the locked descriptor."""
        lock = self._locked()
        try:
            ours = self._listed(lock)
            found = set(os.listdir(self._descriptor))
            if found - ours:
                raise ConfigError(
                    "the offload folder is not empty",
                    hint="name a new folder, or remove its files when no loaded model uses them",
                    path=self.path,
                    found=quote(min(found - ours)),
                )
            for name in found - {LOCK_NAME}:
                os.unlink(name, dir_fd=self._descriptor)
        except BaseException:
            if not os.fstat(lock).st_size:  # this call created the lock file
                with contextlib.suppress(OSError):
                    os.unlink(LOCK_NAME, dir_fd=self._descriptor)
            os.close(lock)
            raise
        return lock

    def _locked(self) -> int:
        """Lock the folder's lock file, waiting for a process that is about to end. Return its descriptor."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        began_s = time.monotonic()
        while True:
            lock = os.open(LOCK_NAME, flags, _PRIVATE, dir_fd=self._descriptor)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_nlink:  # else the former holder has removed the file
                    return lock
            except BlockingIOError:
                owner = _lines(lock, _MOST_TITLE_BYTES)[0].removeprefix(LOCK_TITLE)
                if time.monotonic() - began_s > (SAME_LOAD_S if owner == self._owner else OTHER_LOAD_S):
                    os.close(lock)
                    raise ConfigError(
                        "another load uses the offload folder",
                        hint="name a new folder, or release the model that uses this one",
                        path=self.path,
                        used_by=quote(owner),
                    ) from None
                time.sleep(LOCK_EVERY_S)
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)

    def _listed(self, lock: int) -> set[str]:
        """Return the names of our files by the lock file's list, including the lock file."""
        status = os.fstat(lock)
        if not status.st_size:  # it is new, or no other file was created yet
            return {LOCK_NAME}
        title, *tensors = _lines(lock, _MOST_LIST_BYTES)
        if not title.startswith(LOCK_TITLE) or status.st_uid != os.geteuid():
            return set()
        names = _names(tensor for tensor in tensors if offload_name(tensor) is not None)
        return {LOCK_NAME, *(name for name in names if self._is_file(name))}

    def _is_file(self, name: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return stat.S_ISREG(os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_mode)
        return False

    def _list(self, tensors: Iterable[str], lock: int) -> None:
        """Write the list of our files before the first of them exists."""
        os.ftruncate(lock, 0)
        _write_all(lock, "\n".join((LOCK_TITLE + self._owner, *tensors)).encode())
        os.fsync(self._descriptor)

    def _create(self, tensor: str, size_bytes: int) -> None:
        with self._file(f"{tensor}.dat", os.O_CREAT | os.O_EXCL | os.O_WRONLY) as descriptor:
            self._sizes[tensor] = size_bytes
            if size_bytes:
                os.posix_fallocate(descriptor, 0, size_bytes)

    @contextlib.contextmanager
    def _file(self, name: str, flags: int) -> Iterator[int]:
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, _PRIVATE, dir_fd=self._descriptor)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @property
    def _descriptor(self) -> int:
        if self._folder is None:
            raise ConfigError("the offload folder is not open", path=self.path)
        return self._folder


def _names(tensors: Iterable[str]) -> list[str]:
    """Return the names of all files that a folder with these tensors may have, except the lock file."""
    return [*(f"{tensor}.dat" for tensor in tensors), INDEX_NAME, f"{INDEX_NAME}.part"]


def _lines(lock: int, most_bytes: int) -> list[str]:
    """Return the lines at the beginning of the lock file."""
    return os.pread(lock, most_bytes, 0).decode(errors="replace").split("\n")


def _write_all(descriptor: int, data: bytes) -> None:
    """Write from the file's beginning, and return when the bytes are on the disk."""
    view, offset = memoryview(data), 0
    while offset < len(view):
        offset += os.pwrite(descriptor, view[offset:], offset)
    os.fsync(descriptor)


@contextlib.contextmanager
def _refused(path: str, need_bytes: int) -> Iterator[None]:
    """Raise a typed error when the system refuses a call in the block."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DoesNotFit(
                "the disk of the offload folder is full", need_bytes=need_bytes, path=path, cause=error.strerror
            ) from error
        raise ConfigError(
            "the offload folder cannot be used",
            hint="its parent must exist on the node that loads, and the worker must be allowed to write there",
            path=path,
            cause=error.strerror or type(error).__name__,
        ) from error


class MappedDevice:
    """Several devices as one `Device`."""

    def __init__(self, plan: RankPlan, parts: Mapping[DeviceKey, Device]) -> None:
        """`parts`: one for each device in `plan.segment_devices`."""
        self._order = sorted(parts, key=device_order)
        self._parts = [parts[key] for key in self._order]
        self._part = [self._order.index(key) for key in plan.segment_devices]  # of each segment
        self._local = np.zeros(len(self._part), np.int64)  # number of each segment on its device
        for number in range(len(self._parts)):
            here = [segment for segment, part in enumerate(self._part) if part == number]
            self._local[here] = np.arange(len(here))
        self._segments = len(self._part)
        for staged in plan.staged:  # a tensor is staged on the device of its result, under the plan's own number
            self._part.append(self._part[plan.slices[staged.first].segment])
        self._renumbered: tuple[ReadItems, ReadItems] | None = None  # the plan's items, and with the parts' numbers
        self.receives = all(part.receives for part in self._parts)

    @property
    def name(self) -> str:
        """The names of all devices, such as "cuda:0+cuda:1+cpu+disk"."""
        return "+".join(device_name(key) for key in self._order)

    @property
    def fresh_s(self) -> float:
        return sum(part.fresh_s for part in self._parts)

    @property
    def held_bytes(self) -> int:
        return sum(part.held_bytes for part in self._parts)

    def allocate(self, segment_bytes: tuple[int, ...]) -> None:
        for number, part in enumerate(self._parts):
            here = zip(segment_bytes, self._part, strict=False)
            part.allocate(tuple(size_bytes for size_bytes, of in here if of == number))

    def attach_arena(self, arena: memoryview, slot_bytes: int) -> None:
        for part in self._parts:
            part.attach_arena(arena, slot_bytes)

    def detach_arena(self) -> None:
        self.synchronize()  # one GPU unpins the arena for all of them
        for part in self._parts:
            part.detach_arena()

    def place(self, chunk: memoryview, items: ReadItems, rows: slice) -> None:
        for part, items_of, here in self._split(items, rows):
            part.place(chunk, items_of, here)

    def parts(self, items: ReadItems, rows: slice) -> list[memoryview]:
        return [view for part, items_of, here in self._split(items, rows) for view in part.parts(items_of, here)]

    def stage(self, staged: StagedTensor) -> None:
        self._parts[self._part[staged.source.segment]].stage(staged)

    def convert(self, staged: StagedTensor, slices: Sequence[TensorSlice]) -> None:
        self._parts[self._part[staged.source.segment]].convert(staged, [self._on_part(piece) for piece in slices])

    def synchronize(self) -> None:
        for part in self._parts:
            part.synchronize()

    def quiesce(self) -> None:
        for part in self._parts:
            part.quiesce()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def tensors(self, slices: Sequence[TensorSlice]) -> dict[str, torch.Tensor]:
        table = SliceTable.of(slices)
        part_of = np.array(self._part, np.int64)[table.segment]
        local = replace(table, segment=self._local[table.segment].astype(np.int32))
        found: dict[str, torch.Tensor] = {}
        for number, part in enumerate(self._parts):
            found.update(part.tensors(local.select(np.flatnonzero(part_of == number))))
        return {name: found[name] for name in table.names}

    def free(self) -> None:
        with contextlib.ExitStack() as parts:  # frees each of them, even when another one fails
            for part in self._parts:
                parts.callback(part.free)
            self.synchronize()  # as in `detach_arena`

    def _split(self, items: ReadItems, rows: slice) -> Iterator[tuple[Device, ReadItems, slice]]:
        """Yield the rows in order, grouped into runs on one device."""
        local = self._on_parts(items)
        part_of = (self._part[segment] for segment in items.segment[rows].tolist())
        start = rows.start
        for number, run in groupby(part_of):
            end = start + sum(1 for _ in run)
            yield self._parts[number], local, slice(start, end)
            start = end

    def _on_parts(self, items: ReadItems) -> ReadItems:
        known = self._renumbered
        if known is None or known[0] is not items:
            numbers = np.concatenate((self._local, np.arange(self._segments, len(self._part))))
            known = self._renumbered = (items, replace(items, segment=numbers[items.segment]))
        return known[1]

    def _on_part(self, piece: TensorSlice) -> TensorSlice:
        return replace(piece, segment=int(self._local[piece.segment]))


def open_mapped(
    plan: RankPlan, folder: str, owner: str, open_gpu: Callable[[int], Device] | None = None
) -> MappedDevice:
    """Return the devices that the plan names, before they take memory. `owner`: see `OffloadFolder`."""
    parts: dict[DeviceKey, Device] = {}
    for key in sorted(set(plan.segment_devices), key=device_order):
        if key == DISK:
            on_disk = sorted(
                (piece for piece in plan.slices if plan.segment_devices[piece.segment] == DISK),
                key=lambda piece: piece.segment,
            )
            parts[key] = DiskDevice(OffloadFolder(folder, owner), tuple(on_disk))
        elif key == CPU:
            from actors.devices.cpu_device import CpuDevice

            parts[key] = CpuDevice()
        elif isinstance(key, int):
            parts[key] = (open_gpu or _open_gpu)(key)
    return MappedDevice(plan, parts)


def open_mapped_rank(plan: RankPlan, job: RankJob) -> Device:
    """Return the devices of a rank's job. GPUs start in a thread while the first chunks are fetched."""
    owner = f"{job.load_id} {job.rank}"
    if not any(isinstance(key, int) for key in plan.segment_devices):
        return open_mapped(plan, job.offload_folder, owner)
    return OpeningDevice(lambda: open_mapped(plan, job.offload_folder, owner))


def _open_gpu(index: int) -> Device:
    from actors.devices.cuda_device import CudaDevice

    return CudaDevice(index)


class DiskDevice:
    """Files of an offload folder, as a `Device`. Segment i is the file of `slices[i]`."""

    name = "disk"
    receives = False
    fresh_s = 0.0

    def __init__(self, folder: OffloadFolder, slices: tuple[TensorSlice, ...]) -> None:
        self._folder = folder
        self._slices = slices
        self._staged: dict[int, NDArray[np.uint8]] = {}  # tensors that are still to be converted, by segment

    @property
    def held_bytes(self) -> int:
        return self._folder.size_bytes + sum(len(memory) for memory in self._staged.values())

    def allocate(self, segment_bytes: tuple[int, ...]) -> None:
        names = (piece.name for piece in self._slices)
        self._folder.open(dict(zip(names, segment_bytes, strict=True)))

    def attach_arena(self, arena: memoryview, slot_bytes: int) -> None:
        pass

    def detach_arena(self) -> None:
        pass

    def place(self, chunk: memoryview, items: ReadItems, rows: slice) -> None:
        for row in range(rows.start, rows.stop):
            run, begin, dest = int(items.run_bytes[row]), int(items.src_offset[row]), int(items.dest_offset[row])
            for _ in range(int(items.count[row])):
                self._write(int(items.segment[row]), chunk[begin : begin + run], dest)
                begin, dest = begin + int(items.src_stride[row]), dest + int(items.dest_stride[row])

    def parts(self, items: ReadItems, rows: slice) -> list[memoryview]:
        raise DeviceUnavailable("a socket cannot write to files", device=self.name)

    def stage(self, staged: StagedTensor) -> None:
        self._staged[staged.source.segment] = np.zeros(staged.source.size_bytes, np.uint8)

    def convert(self, staged: StagedTensor, slices: Sequence[TensorSlice]) -> None:
        import torch

        from actors.devices.convert import convert

        made = [torch.empty(piece.size_bytes, dtype=torch.uint8) for piece in slices]
        convert(staged, torch.from_numpy(self._staged.pop(staged.source.segment)), slices, made)
        for piece, data in zip(slices, made, strict=True):
            self._write(piece.segment, data.numpy().data, 0)

    def synchronize(self) -> None:
        pass

    def quiesce(self) -> None:
        pass

    def finish(self) -> None:
        from actors.devices.convert import torch_dtype

        index = {}
        for piece in self._slices:
            if piece.size_bytes:  # Accelerate maps files, and an empty file cannot be mapped
                dtype, shape = torch_dtype(piece.dtype, piece.sizes)
                index[piece.name] = index_entry(str(dtype).removeprefix("torch."), shape)
        self._folder.seal(index)

    def tensors(self, slices: Sequence[TensorSlice]) -> dict[str, torch.Tensor]:
        """Return tensors mapped from the files. Writing to a tensor does not change its file."""
        from actors.devices.convert import tensor_views

        return tensor_views([self._mapped(piece) for piece in self._slices], slices)

    def _mapped(self, piece: TensorSlice) -> torch.Tensor:
        import torch

        if not piece.size_bytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        with self._folder.readable(piece.name) as path:
            try:  # not Python's mmap, which keeps a descriptor for each of maybe thousands of tensors
                return torch.from_file(path, shared=False, size=piece.size_bytes, dtype=torch.uint8, device="cpu")
            except RuntimeError as error:  # torch's error when the system refuses the mapping
                raise OSError(0, str(error).splitlines()[0]) from error

    def _write(self, segment: int, data: memoryview, offset: int) -> None:
        if segment < len(self._slices):
            self._folder.write(self._slices[segment].name, data, offset)
        else:
            self._staged[segment][offset : offset + len(data)] = data

    def free(self) -> None:
        self._folder.remove()
