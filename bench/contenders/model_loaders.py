"""Libraries that load a whole model and allocate its memory by themselves: fastsafetensors, Run:ai."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from bench.harness.contender import Spec


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
