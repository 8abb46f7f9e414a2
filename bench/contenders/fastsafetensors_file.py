"""IBM's fastsafetensors from local files into host memory, without GPU direct storage."""

from __future__ import annotations

from typing import Any

from bench.contender import Case, run_contender
from bench.delivered import check_tensors
from bench.host_buffers import keep_freed_memory
from bench.measure import measured
from bench.spec import Spec

TITLE = "fastsafetensors, files"
CHECKS = False
KEEPS = True
SOURCES = ("file",)
CASES = (
    Case("kept", "tensors kept, fresh memory", CHECKS, KEEPS, memory="fresh", sources=("file",)),
    Case(
        "recycled",
        "tensors kept, second load, freed memory reused",
        CHECKS,
        KEEPS,
        memory="recycled",
        sources=("file",),
        options={"recycled": True},
    ),
)
SETTINGS = [
    {"threads": 2, "block_mib": 16},
    {"threads": 2, "block_mib": 160},
    {"threads": 4, "block_mib": 16},
    {"threads": 16, "block_mib": 16},  # its defaults, but for the block: reads are split by it
    {"threads": 16, "block_mib": 16 << 10},
]


def main(spec: Spec) -> None:
    import torch  # noqa: F401
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def load() -> dict[str, Any]:
        options = spec.options
        loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", max_threads=options["threads"], nogds=True)
        try:
            loader.add_filenames({0: [file.path for file in spec.files]})
            buffers = loader.copy_files_to_device(max_copy_block_size=options["block_mib"] << 20)
            try:
                return {name: buffers.get_tensor(name) for name in loader.get_keys()}
            finally:
                buffers.close()  # its tensors share the memory and stay valid
        finally:
            loader.close()

    touched_bytes = 0
    if spec.options.get("recycled"):
        keep_freed_memory()
        touched_bytes = sum(tensor.nbytes for tensor in load().values())
    with measured(spec, touched_before_bytes=touched_bytes):
        tensors = load()
    check_tensors(spec, tensors)


if __name__ == "__main__":
    run_contender(main)
