"""Files of `torch.save`, read without torch and without running what is in them.

Such a file is a zip archive, uncompressed. `data.pkl` is a pickle of objects. `data/0`, `data/1`... are the bytes of
tensors. `read_torch_file` reads the directory and the pickle. It returns the objects, with a `StoredTensor` for each
tensor: the place of its first element in the file. The bytes stay where they are.

`load_pickle` is an interpreter of pickles of its own. It knows the opcodes that data needs, and imports nothing. The
name of a global must be in a table of constructors here, or in the names that the caller allows. Those become an
`Opaque`, an object that remembers its name, arguments and state. Any other name is `UnsafePickle`. The opcodes that
find objects otherwise (INST, OBJ, extensions, buffers) are unknown. Memory is bounded by the length of the pickle.

A few bytes of a pickle can describe a tuple that has 2**60 elements when it is written out, because its halves are one
object. So no value of a file is formatted, hashed or multiplied before its type and size are checked (`is_shape`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeGuard

from cluster.errors import BrokenCheckpointFile, ConvertError, UnsafePickle
from storage.checkpoints.safetensors_header import DTYPE_BITS, MAX_DIMENSIONS, MAX_ELEMENTS
from storage.problems import quote
from storage.stores.object_store import ByteRange, ObjectStore

MAX_PICKLE_BYTES = 256 << 20
MAX_DIRECTORY_BYTES = 64 << 20
_TAIL_BYTES = 64 << 10  # has the end record, and the directory of most files
_WINDOW_BYTES = 4 << 10  # read at once where a small part is needed
_READERS = 8
_MAX_NAME = 512  # characters of a global; the opcode that names one can repeat long texts

# torch's name of a dtype -> that of safetensors
DTYPES = {
    "float32": "F32",
    "float64": "F64",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}
_STORAGES = {
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "UntypedStorage": "U8",
}
# of torch, without a counterpart in safetensors; storages have the names of their dtypes
_UNSTORABLE = {
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    **{name: name for name in ("complex128", "complex32", "qint8", "quint8", "qint32", "quint4x2", "quint2x4")},
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file. Its numbers are at `offset_bytes` of the file, with strides in elements."""

    dtype: str  # safetensors' own name
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    file: str
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Global:
    """A name in a pickle that was not called: a class or a constant such as `torch.bfloat16`."""

    name: str


@dataclass(eq=False, slots=True)
class Opaque:
    """An object in a pickle that is not built. It has the name of its class, the arguments and the state."""

    name: str
    args: tuple[Any, ...] = field(default=(), repr=False)
    state: Any = field(default=None, repr=False)
    items: list[Any] = field(default_factory=list, repr=False)  # appended to it


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    file: str
    offset_bytes: int
    size_bytes: int


def read_torch_file(
    store: ObjectStore, key: str, *, allowed: Collection[str] = (), within: ByteRange | None = None
) -> Any:
    """Return the objects of a file of `torch.save`.

    Args:
        store: Where the file is.
        key: Its key.
        allowed: Names of globals besides torch's that may be in the pickle. They become `Opaque` or `Global`. One such
            as "megatron.*" allows all names of a package.
        within: The part of the object that is the file. Default: all of it.

    Returns:
        Dicts, lists, tuples and plain values, with `StoredTensor`, `Opaque` and `Global` objects. Offsets count from
        the beginning of the object.

    Raises:
        UnsafePickle: The pickle names a global that is not allowed, or has opcodes that data does not need.
        ConvertError: Tensors have a dtype that safetensors lacks.
        BrokenCheckpointFile: Not a zip file of `torch.save`, or one that is cut short.
        StoreError: The store did not answer.
    """
    part = within or ByteRange(0, store.stat(key).size_bytes)
    view = _View(store, key, part)
    entries = _read_directory(view)
    names = [name for name in entries if name.endswith("/data.pkl")]
    if len(names) != 1:
        raise _broken(key, f"has {len(names)} entries data.pkl, not one, so torch.save did not write it")
    prefix = names[0].removesuffix("data.pkl")
    if (order := entries.get(f"{prefix}byteorder")) is not None:
        said = view.read(_start(view, order), min(order.size_bytes, 16))
        if said != b"little":
            raise _broken(key, f"has the byte order {quote(said.decode('latin-1'))}, and only little is read")
    pickled = entries[names[0]]
    if pickled.size_bytes > MAX_PICKLE_BYTES:
        raise _broken(key, f"has a pickle of {pickled.size_bytes} bytes; at most {MAX_PICKLE_BYTES} are read")
    data = {name.removeprefix(f"{prefix}data/"): one for name, one in entries.items() if f"{prefix}data/" in name}
    with ThreadPoolExecutor(min(_READERS, len(data)) or 1) as pool:
        starts = list(pool.map(lambda one: _start(view, one), data.values()))
    places = {name: (start, one.size_bytes) for (name, one), start in zip(data.items(), starts, strict=True)}
    text = view.read(_start(view, pickled), pickled.size_bytes)
    return load_pickle(text, file=key, allowed=allowed, storages=places)


# The zip archive


@dataclass(frozen=True, slots=True)
class _Entry:
    header: int  # offset of its local header in the archive
    size_bytes: int


def _broken(key: str, problem: str) -> BrokenCheckpointFile:
    return BrokenCheckpointFile(f"{quote(key)} {problem}", hint="copy the file again, or save the checkpoint again")


class _View:
    """The archive in a part of an object. Small reads near each other become one request."""

    def __init__(self, store: ObjectStore, key: str, part: ByteRange) -> None:
        self._store, self.key, self.part = store, key, part
        tail = min(_TAIL_BYTES, part.size_bytes)
        self._windows = [(part.end - tail, self._fetch(part.end - tail, tail))]  # never removed: the first

    def read(self, start: int, count: int) -> bytes:
        """Return bytes at a place of the object, which must be in the archive."""
        if not self.part.start <= start <= start + count <= self.part.end:
            raise _broken(self.key, "has an entry beyond its end")
        for first, window in self._windows:
            if first <= start and start + count <= first + len(window):
                return window[start - first : start - first + count]
        window = self._fetch(start, max(count, min(_WINDOW_BYTES, self.part.end - start)))
        if count <= _WINDOW_BYTES:
            self._windows = [self._windows[0], (start, window)]
        return window[:count]

    def _fetch(self, start: int, count: int) -> bytes:
        buffer = bytearray(count)
        self._store.read_into(self.key, ByteRange(start, start + count), memoryview(buffer))
        return bytes(buffer)


def _read_directory(view: _View) -> dict[str, _Entry]:
    """Return the entries of the zip archive in a part of an object: APPNOTE.TXT of PKWARE, section 4.3."""
    part, key = view.part, view.key
    length = min(_TAIL_BYTES, part.size_bytes)
    tail = view.read(part.end - length, length)
    end = tail.rfind(b"PK\x05\x06")
    if end < 0 or end + 22 > len(tail):
        hint = "files of the format before torch 1.6 are read after torch.load and torch.save with a newer torch"
        raise BrokenCheckpointFile(f"{quote(key)} is not a zip file of torch.save, or it is cut short", hint=hint)
    count, size, start = struct.unpack_from("<HII", tail, end + 10)
    if (count == 0xFFFF or size == 0xFFFFFFFF or start == 0xFFFFFFFF) and end >= 20:
        (record,) = struct.unpack_from("<Q", tail, end - 20 + 8)
        count, size, start = struct.unpack_from("<QQQ", view.read(part.start + record, 56), 32)
    if size > MAX_DIRECTORY_BYTES:
        raise _broken(key, f"has a directory of {size} bytes; at most {MAX_DIRECTORY_BYTES} are read")
    return _parse_directory(view.read(part.start + start, size), count, key, start)


def _parse_directory(directory: bytes, count: int, key: str, limit: int) -> dict[str, _Entry]:
    """Return the entries of a directory. All must be stored without compression, before `limit`."""
    entries: dict[str, _Entry] = {}
    place = 0
    for _ in range(count):
        if directory[place : place + 4] != b"PK\x01\x02" or place + 46 > len(directory):
            raise _broken(key, "has a damaged directory")
        method, packed, size, names, extras, comments, header = struct.unpack_from(
            "<H8xIIHHH8xI", directory, place + 10
        )
        name = directory[place + 46 : place + 46 + names].decode("utf-8", "replace")
        extra = directory[place + 46 + names : place + 46 + names + extras]
        size, packed, header = _wide(extra, size, packed, header)
        if method or size != packed:
            raise _broken(key, f"has the entry {quote(name)} compressed, which torch.save never does")
        if name in entries:
            raise _broken(key, f"has the entry {quote(name)} twice")
        if header + 30 + size > limit:
            raise _broken(key, f"has the entry {quote(name)} beyond its end")
        entries[name] = _Entry(header, size)
        place += 46 + names + extras + comments
    return entries


def _wide(extra: bytes, *values: int) -> tuple[int, ...]:
    """Return sizes and offset with those of 64 bits in the place of 0xFFFFFFFF."""
    place = 0
    while place + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, place)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{min(length, len(extra) - place - 4) // 8}Q", extra, place + 4))
            return tuple(next(wide, one) if one == 0xFFFFFFFF else one for one in values)
        place += 4 + length
    return values


def _start(view: _View, entry: _Entry) -> int:
    """Return where the bytes of an entry begin in the object. Only its local header has the length of the padding."""
    place = view.part.start + entry.header
    header = view.read(place, 30)
    if header[:4] != b"PK\x03\x04":
        raise _broken(view.key, "has no entry where its directory says")
    names, extras = struct.unpack_from("<HH", header, 26)
    start = place + 30 + names + extras
    if start + entry.size_bytes > view.part.end:
        raise _broken(view.key, "has an entry beyond its end")
    return int(start)


# The pickle

_MARK = object()


def load_pickle(
    data: bytes,
    *,
    file: str,
    allowed: Collection[str] = (),
    storages: Mapping[str, tuple[int, int]] | None = None,
) -> Any:
    """Return the objects of a pickle, without running what is in it.

    Args:
        data: The pickle, of protocol 2 to 5.
        file: Name of its file, for messages and for the tensors.
        allowed: Names of globals besides those of torch's tensors.
        storages: (offset in the file, size) of the bytes that persistent ids name.

    Raises:
        UnsafePickle: It names another global, or has opcodes that data does not need.
        ConvertError: It names a dtype that safetensors lacks.
        BrokenCheckpointFile: It is cut short, or an object is not what torch writes.
    """
    try:
        return _Machine(data, file, allowed, storages or {}).run()
    except (
        IndexError,
        KeyError,
        struct.error,
        TypeError,
        ValueError,
        OverflowError,
        AttributeError,
        RecursionError,
    ) as exc:
        raise _broken(file, f"has a damaged pickle: {quote(str(exc))}") from exc


class _Machine:
    """The state of an interpreter: a stack, marks in it, and the memo."""

    def __init__(
        self, data: bytes, file: str, allowed: Collection[str], storages: Mapping[str, tuple[int, int]]
    ) -> None:
        self.data, self.file, self.place = data, file, 0
        self.allowed, self.storages = frozenset(allowed), storages
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.copied = 0  # elements

    def run(self) -> Any:
        while True:
            opcode = self.data[self.place]
            self.place += 1
            if opcode == 0x2E:  # STOP
                return self.stack[-1]
            step = _OPCODES.get(opcode)
            if step is None:
                raise UnsafePickle(
                    f"{quote(self.file)} has the pickle opcode {quote(chr(opcode))}, which data does not need",
                    hint="do not use the file unless you know who wrote it",
                )
            step(self)

    def take(self, count: int) -> bytes:
        """Return the next bytes of the pickle."""
        end = self.place + count
        if count < 0 or end > len(self.data):
            raise ValueError("it is cut short")
        taken, self.place = self.data[self.place : end], end
        return taken

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def check_copy(self, count: int) -> None:
        """Raise ValueError if constructors have copied more elements than the pickle has bytes."""
        self.copied += count
        if self.copied > len(self.data):
            raise ValueError("it copies the same objects again and again")

    def line(self) -> str:
        end = self.data.index(b"\n", self.place)
        return self.take(end + 1 - self.place)[:-1].decode()

    def above_mark(self) -> list[Any]:
        for place in range(len(self.stack) - 1, -1, -1):
            if self.stack[place] is _MARK:
                taken = self.stack[place + 1 :]
                del self.stack[place:]
                return taken
        raise ValueError("a mark is missing")

    def find(self, name: str) -> Global:
        if len(name) > _MAX_NAME:
            raise ValueError(f"a name of {len(name)} characters")
        head, _, tail = name.rpartition(".")
        of_torch = name in _CLASSES or (head == "torch" and (tail in DTYPES or tail in _STORAGES))
        of_python = name in _CONSTRUCTORS or name in _GETATTR
        if of_torch or of_python or name in self.allowed or f"{name.partition('.')[0]}.*" in self.allowed:
            return Global(name)
        if head == "torch" and tail in _UNSTORABLE:
            raise ConvertError(
                f"{quote(self.file)} has tensors of {_UNSTORABLE[tail]}, and safetensors has no such dtype",
                hint="cast them before they are saved, such as complex128 to complex64, or leave them out",
            )
        raise UnsafePickle(
            f"{quote(self.file)} wants to import {quote(name)}, which no checkpoint of this format needs",
            hint="do not use the file unless you know who wrote it; nothing of it was run",
        )

    def call(self, made: object, args: object) -> Any:
        if not isinstance(made, Global) or not isinstance(args, tuple):
            raise ValueError("a call of what is no global")
        if made.name in _GETATTR:
            # Protocol 2 names a class within a class so, and Python before 3.11.4 a member of an enumeration.
            owner, name = args
            if not isinstance(owner, Global) or not isinstance(name, str):
                raise ValueError("an attribute of what is no class")
            is_member = owner.name in self.allowed and name.isidentifier() and not name.startswith("_")
            full = f"{owner.name}.{name}"
            return Global(full) if is_member and len(full) <= _MAX_NAME else self.find(full)
        constructor = _CONSTRUCTORS.get(made.name)
        return Opaque(made.name, args) if constructor is None else constructor(self, *args)

    def storage(self, identity: Any) -> _Storage:
        """Return the bytes that a persistent id names: ("storage", class, key, device, number of elements)."""
        _, kind, key, _, _ = identity
        if not isinstance(key, str):
            raise ValueError("the key of a storage is no text")
        start, size_bytes = self.storages[key]
        return _Storage(_STORAGES[kind.name.removeprefix("torch.")], self.file, start, size_bytes)

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def state(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if isinstance(made, Opaque):
            made.state = state
        elif not isinstance(made, StoredTensor | dict):  # both have attributes that nobody needs
            raise ValueError("a state for what is no object")

    def extend(self, values: list[Any]) -> None:
        made = self.stack[-1]
        if not isinstance(made, Opaque | list):
            raise ValueError("items for what is no list")
        (made if isinstance(made, list) else made.items).extend(values)

    def set_items(self, values: list[Any]) -> None:
        made = self.stack[-1]
        pairs = list(zip(values[::2], values[1::2], strict=True))
        if isinstance(made, Opaque):
            made.items.extend(pairs)
        elif isinstance(made, dict):
            made.update((_key(name), value) for name, value in pairs)
        else:
            raise ValueError("items for what is no dict")

    def pop_call(self) -> Any:
        args = self.stack.pop()
        return self.call(self.stack.pop(), args)

    def pop_call_with_names(self) -> Any:
        names = self.stack.pop()
        made = self.pop_call()
        if names and isinstance(made, Opaque):
            made.items.append(names)
        return made

    def pop_global(self) -> Global:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("a global whose name is no text")
        return self.find(f"{module}.{name}")

    def tuple_of(self, count: int) -> tuple[Any, ...]:
        taken = tuple(self.stack[-count:])
        if len(taken) < count or any(one is _MARK for one in taken):
            raise ValueError("too few objects for a tuple")
        del self.stack[-count:]
        return taken


def _key(name: object) -> object:
    """Return a key of a dict. A tuple of tuples is refused: its hash can take exponential time.

    Long tuples and integers are refused, too. Python hashes them again each time that one is a key.
    """
    if isinstance(name, tuple) and len(name) <= MAX_DIMENSIONS and all(map(_is_plain, name)):
        return name
    if _is_plain(name):
        return name
    raise ValueError(f"a {type(name).__name__} as the key of a dict")


def _is_plain(value: object) -> bool:
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 64
    return isinstance(value, str | float | bytes | None | Global | Opaque)


def _ordered(machine: _Machine, pairs: object = ()) -> dict[Any, Any]:
    if not isinstance(pairs, list | tuple):
        raise ValueError("an OrderedDict of what is no list")
    machine.check_copy(len(pairs))
    return {_key(name): value for name, value in pairs}


def _encoded(machine: _Machine, text: object, encoding: object = "latin1") -> bytes:
    """Return bytes, which protocol 2 pickles as a text to encode."""
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("bytes of no text")
    machine.check_copy(len(text))
    return text.encode("latin-1")


def is_shape(value: object) -> TypeGuard[tuple[int, ...] | list[int]]:
    """Return whether a value of a file is a tuple or list of counts that a tensor can have as its shape."""
    return _are_counts(value) and prod(value) <= MAX_ELEMENTS


def _are_counts(value: object) -> TypeGuard[tuple[int, ...] | list[int]]:
    return (
        isinstance(value, tuple | list)
        and len(value) <= MAX_DIMENSIONS
        and all(type(one) is int and 0 <= one <= MAX_ELEMENTS for one in value)
    )


def _size(machine: _Machine, counts: object = ()) -> tuple[int, ...]:
    if not isinstance(counts, tuple | list) or len(counts) > MAX_DIMENSIONS:
        raise ValueError("a torch.Size of what are no sizes")
    if not all(type(one) is int and abs(one) < 1 << 63 for one in counts):
        raise ValueError("a torch.Size of what are no sizes")
    return tuple(counts)


def _tensor(machine: _Machine, storage: object, offset: object, shape: object, strides: object, *rest: object) -> Any:
    """Return the place of a tensor: `torch._utils._rebuild_tensor_v2`."""
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor without a storage")
    _refuse_lazy(rest[2:])
    return _placed(storage, storage.dtype, offset, shape, strides)


def _tensor_of_dtype(
    machine: _Machine, storage: object, offset: object, shape: object, strides: object, *rest: Any
) -> Any:
    """Return the place of a tensor with untyped storage: `torch._utils._rebuild_tensor_v3`."""
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor without a storage")
    _refuse_lazy(rest[3:])
    return _placed(storage, DTYPES[rest[2].name.removeprefix("torch.")], offset, shape, strides)


def _refuse_lazy(metadata: Sequence[object]) -> None:
    """Raise ValueError if a tensor's metadata, which may be missing, says that its numbers are stored otherwise."""
    for one in metadata:
        if isinstance(one, dict) and (one.get("conj") or one.get("neg")):
            raise ValueError("a lazy conjugate or negative, of which another tensor is stored; use resolve_conj()")


def _placed(storage: _Storage, dtype: str, offset: Any, shape: Any, strides: Any) -> StoredTensor:
    good = is_shape(shape) and _are_counts(strides) and len(shape) == len(strides)
    if not good or type(offset) is not int or not 0 <= offset <= MAX_ELEMENTS:
        raise ValueError("a tensor whose shape and strides are impossible")
    shape, strides = tuple(shape), tuple(strides)
    item_bytes = DTYPE_BITS[dtype] // 8
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if prod(shape) and (last + 1) * item_bytes > storage.size_bytes:
        raise ValueError(f"a tensor of shape {shape} that is larger than its storage of {storage.size_bytes} bytes")
    return StoredTensor(dtype, shape, strides, storage.file, storage.offset_bytes + offset * item_bytes)


def _parameter(machine: _Machine, tensor: object, *_: object) -> Any:
    return tensor


def _of_type(machine: _Machine, made: object, kind: object, args: object, state: object = None, *_: object) -> Any:
    result = machine.call(made, args)
    if isinstance(result, Opaque) and result.state is None:
        result.state = state  # what a subclass of torch.Tensor holds, such as a DTensor
    return result


_CONSTRUCTORS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered,
    "_codecs.encode": _encoded,
    "torch.Size": _size,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_type,
}
_GETATTR = ("builtins.getattr", "__builtin__.getattr")
_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.device", "torch.serialization._get_layout")


def _push(read: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.stack.append(read(machine))

    return step


def _text(size_bytes: int) -> Callable[[_Machine], None]:
    return _push(lambda machine: machine.take(machine.number(size_bytes)).decode("utf-8", "surrogatepass"))


def _bytes(size_bytes: int) -> Callable[[_Machine], None]:
    return _push(lambda machine: machine.take(machine.number(size_bytes)))


def _long(size_bytes: int) -> Callable[[_Machine], None]:
    return _push(lambda machine: int.from_bytes(machine.take(machine.number(size_bytes)), "little", signed=True))


def _pairs(machine: _Machine) -> dict[Any, Any]:
    values = machine.above_mark()
    return {_key(name): value for name, value in zip(values[::2], values[1::2], strict=True)}


def _set_item(machine: _Machine) -> None:
    value = machine.stack.pop()
    name = machine.stack.pop()
    machine.set_items([name, value])


def _line_global(machine: _Machine) -> Global:
    module, name = machine.line(), machine.line()
    return machine.find(f"{module}.{name}")


# opcode -> step; Lib/pickletools.py of CPython describes each
_OPCODES: Mapping[int, Callable[[_Machine], Any]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME
    ord("("): _push(lambda m: _MARK),
    ord("0"): lambda m: m.stack.pop(),
    ord("1"): lambda m: m.above_mark(),
    ord("2"): _push(lambda m: m.stack[-1]),
    ord("N"): _push(lambda m: None),
    0x88: _push(lambda m: True),
    0x89: _push(lambda m: False),
    ord("J"): _push(lambda m: struct.unpack("<i", m.take(4))[0]),
    ord("K"): _push(lambda m: m.number(1)),
    ord("M"): _push(lambda m: m.number(2)),
    0x8A: _long(1),
    0x8B: _long(4),
    ord("G"): _push(lambda m: struct.unpack(">d", m.take(8))[0]),
    ord("X"): _text(4),
    0x8C: _text(1),
    0x8D: _text(8),
    ord("B"): _bytes(4),
    ord("C"): _bytes(1),
    0x8E: _bytes(8),
    ord(")"): _push(lambda m: ()),
    ord("t"): _push(lambda m: tuple(m.above_mark())),
    0x85: _push(lambda m: m.tuple_of(1)),
    0x86: _push(lambda m: m.tuple_of(2)),
    0x87: _push(lambda m: m.tuple_of(3)),
    ord("]"): _push(lambda m: []),
    ord("l"): _push(lambda m: m.above_mark()),
    ord("a"): lambda m: m.extend([m.stack.pop()]),
    ord("e"): lambda m: m.extend(m.above_mark()),
    ord("}"): _push(lambda m: {}),
    ord("d"): _push(_pairs),
    ord("s"): _set_item,
    ord("u"): lambda m: m.set_items(m.above_mark()),
    0x8F: _push(lambda m: []),  # EMPTY_SET: a list here
    0x90: lambda m: m.extend(m.above_mark()),
    0x91: _push(lambda m: m.above_mark()),  # FROZENSET
    ord("h"): _push(lambda m: m.memo[m.number(1)]),
    ord("j"): _push(lambda m: m.memo[m.number(4)]),
    ord("q"): lambda m: m.put(m.number(1)),
    ord("r"): lambda m: m.put(m.number(4)),
    0x94: lambda m: m.put(len(m.memo)),  # MEMOIZE
    ord("c"): _push(_line_global),
    0x93: _push(lambda m: m.pop_global()),
    ord("R"): _push(lambda m: m.pop_call()),
    0x81: _push(lambda m: m.pop_call()),  # NEWOBJ
    0x92: _push(lambda m: m.pop_call_with_names()),  # NEWOBJ_EX
    ord("b"): lambda m: m.state(),
    ord("Q"): _push(lambda m: m.storage(m.stack.pop())),
}
