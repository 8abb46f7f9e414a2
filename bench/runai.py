"""Run:ai's model streamer, as both of its contenders use it.

Its own buffers are the destination, so memory cannot be given to it. What it can be made to reuse is what malloc was
told to keep from a load before (`recycled`), or, where tensors are consumed as they come, a ring of a few buffers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bench.contender import Case
from bench.delivered import Reference, check_tensors
from bench.host_buffers import keep_freed_memory
from bench.measure import measured
from bench.spec import Source, Spec


def cases(source: Source) -> tuple[Case, ...]:
    return (
        Case("kept", "tensors kept, fresh memory", False, True, memory="fresh", sources=(source,)),
        Case(
            "recycled",
            "tensors kept, second load, freed memory reused",
            False,
            True,
            memory="recycled",
            sources=(source,),
            options={"recycled": True},
        ),
        Case(
            "passing",
            "tensors not kept",
            False,
            False,
            memory="none",
            sources=(source,),
            options={"passing": True},
        ),
    )


def set_variables(options: Mapping[str, Any]) -> None:
    """The streamer's variables that a setting names, before it is imported. Those of the user's own are dropped."""
    for name in [name for name in os.environ if name.startswith("RUNAI_STREAMER_")]:
        del os.environ[name]
    os.environ.update({name: str(value) for name, value in options.items() if name.startswith("RUNAI_STREAMER_")})


def run(spec: Spec, uris: list[str]) -> None:
    """Load once, measured, and check what came: the tensors, or without keeping them those of a second pass."""
    import torch  # noqa: F401
    from runai_model_streamer import SafetensorsStreamer

    if spec.options.get("passing"):
        with measured(spec):
            for _ in _stream(SafetensorsStreamer, uris, owned=False):
                pass
        reference = Reference(spec)
        reference.check_torch(_stream(SafetensorsStreamer, uris, owned=False))
        reference.check_complete()
        return
    load = _load_cloned if spec.options.get("clone") else _load_owned
    touched_bytes = 0
    if spec.options.get("recycled"):
        keep_freed_memory()
        touched_bytes = sum(tensor.nbytes for tensor in load(SafetensorsStreamer, uris).values())
    with measured(spec, touched_before_bytes=touched_bytes):
        tensors = load(SafetensorsStreamer, uris)
    check_tensors(spec, tensors)


def _stream(streamer: Callable[[], Any], uris: list[str], *, owned: bool) -> Iterator[tuple[str, Any]]:
    with streamer() as opened:
        opened.stream_files(uris, device="cpu", owned=owned)
        yield from opened.get_tensors()


def _load_owned(streamer: Callable[[], Any], uris: list[str]) -> dict[str, Any]:
    """The streamer gives its buffers away, tensors are views into them."""
    return dict(_stream(streamer, uris, owned=True))


def _load_cloned(streamer: Callable[[], Any], uris: list[str]) -> dict[str, Any]:
    """The streamer's buffers go round, every tensor is copied out: worth it when its buffers are few and warm."""
    return {name: tensor.clone() for name, tensor in _stream(streamer, uris, owned=False)}
