"""The safetensors library: what most programs load with today.

On a CPU its tensors are views into the mapped file, so nothing is read until they are touched. To be compared, they
are copied out (as a program does that closes the file or writes into a model), or every page is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.contender import Case, run_contender
from bench.delivered import check_tensors
from bench.host_buffers import keep_freed_memory
from bench.in_threads import in_threads
from bench.measure import measured
from bench.spec import Spec

TITLE = "safetensors"
CHECKS = False
KEEPS = True
SOURCES = ("file",)
CASES = (
    Case("clone", "safe_open and clone", CHECKS, True, memory="fresh", sources=("file",)),
    Case(
        "recycled",
        "safe_open and clone, second load, freed memory reused",
        CHECKS,
        True,
        memory="recycled",
        sources=("file",),
        options={"recycled": True},
    ),
    Case(
        "mapped",
        "load_file, every page touched, tensors stay views of the file",
        CHECKS,
        False,
        memory="none",
        sources=("file",),
        options={"mapped": True},
    ),
)
SETTINGS = [{"threads": 1}, {"threads": 2}]
_PAGE_BYTES = 4096


def main(spec: Spec) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file

    torch.set_num_threads(spec.options["threads"])  # a clone is spread over them, too

    def clone(path: str) -> dict[str, Any]:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no mapping

    def touch(path: str) -> dict[str, Any]:
        tensors = load_file(path, device="cpu")
        for tensor in tensors.values():
            tensor.reshape(-1).view(torch.uint8)[::_PAGE_BYTES].sum()
        return tensors

    load = touch if spec.options.get("mapped") else clone
    touched_bytes = 0
    if spec.options.get("recycled"):
        keep_freed_memory()
        touched_bytes = sum(tensor.nbytes for tensor in _load(spec, load).values())
    with measured(spec, touched_before_bytes=touched_bytes):
        tensors = _load(spec, load)
    check_tensors(spec, tensors)


def _load(spec: Spec, load: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """All files, each thread taking the next one."""
    todo = iter(spec.files)
    tensors: dict[str, Any] = {}

    def work() -> None:
        for file in todo:
            tensors.update(load(file.path))

    in_threads(spec.options["threads"], work)
    return tensors


if __name__ == "__main__":
    run_contender(main)
