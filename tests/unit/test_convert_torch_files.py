"""Files of torch.save are read without torch: the same tensors, and nothing of a hostile pickle is run."""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
import time
import tracemalloc
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.converting.torch_files import Global, Opaque, StoredTensor, load_pickle, read_torch_file
from cluster.errors import BrokenCheckpointFile, UnsafePickle
from storage.stores.object_store import ByteRange, MemoryStore


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def numbers(content: bytes, tensor: StoredTensor) -> np.ndarray:
    kind = {"F32": np.float32, "I64": np.int64, "BF16": np.uint16, "BOOL": np.bool_}[tensor.dtype]
    size = np.dtype(kind).itemsize
    strides = tuple(size * one for one in tensor.strides)
    return np.ndarray(tensor.shape, kind, content, tensor.offset_bytes, strides)


def test_tensors_are_found_where_torch_put_them() -> None:
    base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    value = {
        "view": base[1:, ::2, 1:4],
        "turned": base.permute(2, 0, 1),
        "shared": torch.nn.Parameter(base),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "bits": torch.tensor([True, False]),
        "half": torch.randn(3).bfloat16(),
        "plain": [1, -(2**40), 2.5, None, "text", b"bytes", {"nested": (True, torch.Size([2, 3]))}],
    }
    content = saved(value)
    found = read_torch_file(MemoryStore({"file": content}), "file")
    for name in ("view", "turned", "shared", "scalar", "empty", "bits"):
        assert np.array_equal(numbers(content, found[name]), value[name].detach().numpy()), name  # type: ignore[attr-defined]
    assert np.array_equal(numbers(content, found["half"]), value["half"].view(torch.int16).numpy().view(np.uint16))  # type: ignore[attr-defined]
    assert found["plain"] == value["plain"]


def test_file_inside_an_object_is_read() -> None:
    inner = saved(torch.arange(5))
    content = b"before" + inner + b"after"
    part = ByteRange(6, 6 + len(inner))
    found = read_torch_file(MemoryStore({"file": content}), "file", within=part)
    assert numbers(content, found).tolist() == [0, 1, 2, 3, 4]


class Attack:
    """Calls a function when it is unpickled."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call, self.args


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize(
    "attack",
    [
        Attack(os.system, "touch run"),
        Attack(eval, "open('run', 'w')"),
        Attack(subprocess.Popen, ["touch", "run"]),
        [Attack(getattr, Attack(__import__, "os"), "system")],
        {"a": ({"b": Attack(exec, "open('run', 'w')")},)},
        Attack(torch.load, "other.pt"),
    ],
)
def test_code_in_a_pickle_is_refused(
    attack: object, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsafePickle) as raised:
        load_pickle(pickle.dumps(attack, protocol), file="weights.pt")
    assert "weights.pt" in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("protocol", [2, 5])
def test_members_of_an_enumeration_are_read_as_python_before_3_11_4_writes_them(protocol: int) -> None:
    def load(member: str) -> object:
        return load_pickle(pickle.dumps(Attack(getattr, HTTPStatus, member), protocol), file="f", allowed=[name])

    name = "http.HTTPStatus"
    assert load("OK") == Global(f"{name}.OK")
    for refused in ("__init__", "OK.real"):
        with pytest.raises(UnsafePickle):
            load(refused)


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word)) + word.encode()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02(cos\nsystem\n" + text("true") + b"o.",  # OBJ
        b"\x80\x02(" + text("true") + b"ios\nsystem\n.",  # INST
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x05\x97.",  # NEXT_BUFFER
        b"\x80\x02ctorch\nload\n.",
        b"\x80\x04" + b"\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x04" + b"\x8c\x05torch\x8c\x12_utils.os.system.x\x93.",
    ],
)
def test_unknown_opcodes_and_names_are_refused(data: bytes) -> None:
    with pytest.raises(UnsafePickle):
        load_pickle(data, file="f")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02",
        b"\x80\x02t.",
        b"\x80\x02K\x01\x87.",
        b"\x80\x02h\x07.",
        b"\x80\x02\x8b\xff\xff\xff\xff.",  # a number of 4 GB
        b"\x80\x02X\xff\xff\xff\xff.",
        b"\x80\x02}(K\x01u.",
        b"\x80\x02]K\x01b.",
        b"\x80\x02K\x01)R.",
        b"\x80\x02X\x01\x00\x00\x000Q.",
        # a tensor of 2**62 numbers in a storage of 16
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + b"ctorch\nFloatStorage\n"
        + text("0") + text("cpu") + b"K\x04tQK\x00\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x40\x85K\x01\x85\x89}tR.",
        b"\x80\x02}K\x01" + b"\x85" * 5000 + b"K\x01s.",  # a key of nested tuples
    ],
)  # fmt: skip
def test_damaged_pickles_are_refused(data: bytes) -> None:
    with pytest.raises(BrokenCheckpointFile):
        load_pickle(data, file="f", storages={"0": (0, 16)})


def test_bombs_cost_no_more_than_their_length() -> None:
    """Tuples of twice the same, a huge index of the memo, and lists in lists."""
    doubled = b"\x80\x02K\x01" + b"2\x86" * 30_000 + b"."
    far = b"\x80\x02K\x01" + b"".join(b"r" + struct.pack("<I", 2**32 - 1 - one) for one in range(30_000)) + b"."
    nested = b"\x80\x02" + b"]" * 30_000 + b"a" * 29_999 + b"."
    as_key = b"\x80\x02}K\x01" + b"2\x86" * 60 + b"K\x01s."
    tracemalloc.start()
    for data in (doubled, far, nested):
        load_pickle(data, file="f")
    with pytest.raises(BrokenCheckpointFile):  # its hash would take 2**60 steps
        load_pickle(as_key, file="f")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 << 20


DOUBLED = b"K\x01\x85" + b"2\x86" * 24  # a tuple of 2**24 numbers when it is written out
LONG = text("a" * 100_000) + b"q\x00"
LISTED = b"](" + b"N\x88\x86" * 30_000 + b"eq\x00"
REPEATED = {  # each makes a copy, or a hash, of the long object before it
    "bytes": b"(" + LONG + b"c_codecs\nencode\nq\x01h\x00\x85q\x02R" + b"h\x01h\x02R" * 20_000 + b"t",
    "dicts": b"(" + LISTED + b"ccollections\nOrderedDict\nq\x01h\x00\x85q\x02R" + b"h\x01h\x02R" * 1000 + b"t",
    "sizes": b"(" + LISTED.replace(b"N\x88\x86", b"K\x01") + b"ctorch\nSize\nh\x00\x85R" * 1000 + b"t",
    "names": b"(X\x08\x00\x00\x00megatronq\x01" + LONG + b"h\x01h\x00\x93" * 20_000 + b"t",
    "tuples": b"](K\x01" + b"2" * 100_000 + b"tq\x000}(" + b"h\x00N" * 20_000 + b"u",
    "integers": b"\x8b\xa0\x86\x01\x00" + b"\x01" * 100_000 + b"q\x000}(" + b"h\x00N" * 20_000 + b"u",
}


@pytest.mark.parametrize(
    "data",
    [
        DOUBLED + text("x") + b"\x93",  # the module of a global
        text("torch") + DOUBLED + b"\x93",
        b"cbuiltins\ngetattr\nctorch\nTensor\n" + DOUBLED + b"\x86R",
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + DOUBLED + b"NK\x05tQ",
        *REPEATED.values(),
    ],
)
def test_objects_are_not_formatted_hashed_or_copied_unchecked(data: bytes) -> None:
    tracemalloc.start()
    started_s = time.process_time()
    with pytest.raises(BrokenCheckpointFile):
        load_pickle(b"\x80\x02" + data + b".", file="f", allowed=("builtins.getattr", "megatron.*"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20
    assert time.process_time() - started_s < 3
    assert len(repr(Opaque("x", args=((1,) * 10_000,)))) < 100


def test_allowed_names_become_inert() -> None:
    data = pickle.dumps(Attack(os.system, "touch run"))
    found = load_pickle(data, file="f", allowed=("posix.system",))
    assert isinstance(found, Opaque)
    assert (found.name, found.args) == ("posix.system", ("touch run",))


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    content = saved({"w": torch.zeros(4)})
    legacy = io.BytesIO()
    torch.save({"w": torch.zeros(4)}, legacy, _use_new_zipfile_serialization=False)
    for damaged in (
        b"",
        content[:100],
        content[:-30],
        legacy.getvalue(),
        content.replace(b"PK\x03\x04", b"PK\x03\x05"),
    ):
        with pytest.raises(BrokenCheckpointFile):
            read_torch_file(MemoryStore({"file": damaged}), "file")
    with pytest.raises(BrokenCheckpointFile, match="byte order"):
        read_torch_file(MemoryStore({"file": content.replace(b"little", b"biggie")}), "file")
