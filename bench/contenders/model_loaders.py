"""Libraries that load a whole model and allocate its memory by themselves: safetensors, fastsafetensors, Run:ai.

They check nothing. A destination cannot be given, so recycled memory is a second load in the same process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from bench.contenders.buffers import check_tensors, in_threads, load_tensors
from bench.contenders.s3_clients import set_s3_environment
from bench.harness.contender import Spec
from bench.harness.measure import measured

_PAGE_BYTES = 4096


def load_safetensors(spec: Spec) -> None:
    """Load with the safetensors library, as most programs do today.

    On a CPU its tensors are views into the mapped file, and nothing is read until they are touched. To be compared,
    they are copied out, or with the option "mapped" every page is touched.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file

    threads = spec.options["threads"]
    torch.set_num_threads(threads)  # a clone is spread over them, too

    def load_one(path: str) -> dict[str, Any]:
        if spec.options.get("mapped"):
            tensors = load_file(path, device="cpu")
            for tensor in tensors.values():
                tensor.reshape(-1).view(torch.uint8)[::_PAGE_BYTES].sum()
            return tensors
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no mapping

    def load() -> dict[str, Any]:
        todo = iter(spec.files)
        tensors: dict[str, Any] = {}

        def work() -> None:
            for file in todo:
                tensors.update(load_one(file.path))

        in_threads(threads, work)
        return tensors

    load_tensors(spec, load)


def load_fast(spec: Spec) -> None:
    """Load local files with IBM's fastsafetensors into host memory, without GPU direct storage."""
    import fastsafetensors  # noqa: F401

    load_tensors(spec, lambda: fastsafetensors_tensors(spec, "cpu"))


def fastsafetensors_tensors(spec: Spec, device: str, **options: Any) -> dict[str, Any]:
    """Return all tensors of the local files, loaded by fastsafetensors to that device of torch."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(
        SingleGroup(),
        device=device,
        nogds=True,  # files in tmpfs have no direct storage
        max_threads=spec.options["threads"],
        **options,
    )
    try:
        loader.add_filenames({0: [file.path for file in spec.files]})
        buffers = loader.copy_files_to_device(max_copy_block_size=spec.options["block_mib"] << 20)
        try:
            return {name: buffers.get_tensor(name) for name in loader.get_keys()}
        finally:
            buffers.close()  # its tensors share the memory and stay valid
    finally:
        loader.close()


def load_runai_files(spec: Spec) -> None:
    """Load local files with Run:ai's model streamer."""
    set_runai_variables(spec.options)
    _load_runai(spec, [file.path for file in spec.files])


def load_runai_s3(spec: Spec) -> None:
    """Load from S3 with Run:ai's model streamer."""
    set_s3_environment(spec)
    set_runai_variables({"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": 0, **spec.options})
    _load_runai(spec, [f"s3://{spec.bucket}/{file.key}" for file in spec.files])


def set_runai_variables(options: Mapping[str, Any]) -> None:
    """Set the streamer's variables that a setting names, before it is imported. Those of the user are dropped."""
    for name in [name for name in os.environ if name.startswith("RUNAI_STREAMER_")]:
        del os.environ[name]
    os.environ.update({name: str(value) for name, value in options.items() if name.startswith("RUNAI_STREAMER_")})


def runai_tensors(uris: list[str], device: str, **options: Any) -> Iterator[tuple[str, Any]]:
    """Yield all tensors, as the streamer delivers them to that device of torch."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(uris, device=device, **options)
        yield from streamer.get_tensors()


def _load_runai(spec: Spec, uris: list[str]) -> None:
    """Load once, measured. With the option "passing" no tensor is kept, and those of a second pass are compared."""
    import runai_model_streamer  # noqa: F401
    import torch  # noqa: F401

    if spec.options.get("passing"):
        with measured(spec):
            for _ in runai_tensors(uris, "cpu", owned=False):
                pass
        check_tensors(spec, runai_tensors(uris, "cpu", owned=False))
    else:  # the streamer gives its buffers away, and tensors are views into them
        load_tensors(spec, lambda: dict(runai_tensors(uris, "cpu", owned=True)))
