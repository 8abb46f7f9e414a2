"""Revisions of a checkpoint: the same tensors, some with other contents."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Collection
from pathlib import Path

import numpy as np

CHANGED = "model.layers.1.mlp.up_proj.weight"  # of the stored Llama


def changed_copy(source: Path, folder: Path, names: Collection[str] = (CHANGED,), flip: int = 1) -> Path:
    """Copy a checkpoint to a new folder, with these tensors' lowest bytes of 16-bit elements XORed with `flip`."""
    shutil.copytree(source, folder)
    for shard in folder.glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        (size,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + size])
        for name in header.keys() & set(names):
            begin, end = header[name]["data_offsets"]
            np.frombuffer(data, np.uint8)[8 + size + begin : 8 + size + end : 2] ^= flip
        shard.write_bytes(data)
    return folder
