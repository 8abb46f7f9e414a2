"""How an offload folder looks, in the format of Hugging Face Accelerate: one file per tensor, and an index. Pure.

    index.json                            {"model.norm.weight": {"dtype": "bfloat16", "shape": [4096]}, ...}
    model.norm.weight.dat                 the tensor's bytes, nothing else

Names of tensors come from a bucket: one that could leave the folder, or that no file can have, is refused.
"""

from __future__ import annotations

INDEX_NAME = "index.json"
MAX_NAME_BYTES = 255  # of a file, on every file system that matters


def offload_name(tensor: str) -> str | None:
    """Name of the tensor's file; None when none can be had."""
    name = f"{tensor}.dat"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return None
    unsafe = any(char in name for char in "/\\\0") or not tensor.isprintable()
    return None if unsafe or not tensor or size > MAX_NAME_BYTES else name


def index_entry(torch_dtype: str, shape: tuple[int, ...]) -> dict[str, object]:
    """What the index says of a tensor; `torch_dtype` as in "bfloat16"."""
    return {"dtype": torch_dtype, "shape": list(shape)}
