"""Whole loads by layout, Longshore beside the alternatives, on this machine: `python -m bench.run`.

    nginx <-- contender --> lines of JSON      each contender a process of its own, one at a time, rounds interleaved
                              |
              results.json, and tables on the terminal

A scene is a layout, a source and a link: "tp4/http", "fsdp2/file", "tp4/1000mbit". Longshore runs with its default
settings. Exit code 0; 1 when a contender failed, and not when one is merely absent; 2 when nothing could be run.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.contenders.table import CONTENDERS
from bench.harness.contender import NotRunnable, Source, Spec
from bench.harness.link import NoLink, RateLimitedLink
from bench.harness.models import PART, PART_BUCKET, NoRoom, make_models
from bench.harness.report import describe_machine, describe_versions, load_tables
from bench.harness.results import Entry, Run, entries_of
from bench.harness.rounds import RunFailed, run_once, run_rounds
from bench.harness.run_folder import NGINX, run_folder
from bench.harness.store import NoRangeServer, RangeServer, nginx_version
from bench.options import add_model_options, new_parser, size, write_json
from cluster.command_line.demo import sandbox
from cluster.joining.patience import sigterm_interrupts

SIZE, SMALL_SIZE = "1GB", "40MB"
ROUNDS = 3
_LIMITS, _OURS = ("limit_arena", "limit_direct"), ("longshore_arena", "longshore_direct")
_UNKEPT = ("longshore_arena_unkept", "longshore_direct_unkept")
_HTTP = (*_LIMITS, *_OURS, "runai", "obstore_whole", "obstore_rows", "download")


@dataclass(frozen=True, slots=True)
class Scene:
    """A layout, a source and a link, and the contenders that are measured there."""

    name: str
    title: str
    layout: Mapping[str, int]  # arguments of `cluster.load`
    contenders: tuple[str, ...]
    source: Source = "http"
    mbit: int = 0  # of the link; 0: no limit
    whole: bool = True  # the whole model, and not the one of a quarter of the size

    @property
    def ranks(self) -> int:
        return next(iter(self.layout.values()))


def _tp(ranks: int) -> dict[str, int]:
    return {"tensor_parallel_size": ranks}


def _fsdp(ranks: int) -> dict[str, int]:
    return {"fsdp_size": ranks}


_LINKED = ("longshore_arena", "runai", "obstore_rows", "download")
_VLLM = ("longshore_vllm", "runai_vllm", "download_vllm")
SCENES = (
    Scene("tp2/http", "Tensor parallel over 2 ranks", _tp(2), _HTTP),
    Scene("tp4/http", "Tensor parallel over 4 ranks", _tp(4), _HTTP),
    Scene("tp8/http", "Tensor parallel over 8 ranks", _tp(8), _HTTP),
    Scene("fsdp4/http", "FSDP over 4 ranks", _fsdp(4), _HTTP),
    Scene("tp4/https", "Tensor parallel over 4 ranks, TLS", _tp(4), (*_LIMITS, *_OURS, "obstore_rows"), "https"),
    Scene("fsdp4/https", "FSDP over 4 ranks, TLS", _fsdp(4), (*_LIMITS, *_OURS, "obstore_rows"), "https"),
    Scene(
        *("fsdp2/file", "FSDP over 2 ranks, local files in the page cache", _fsdp(2)),
        *((*_LIMITS, *_OURS, "safetensors", "runai_file"), "file"),
    ),
    # All ranks together read up to four times the model, so a slow link has the smaller one.
    Scene("tp4/1000mbit", "Tensor parallel over 4 ranks, link of 1 Gbit/s", _tp(4), _LINKED, mbit=1000, whole=False),
    Scene(
        *("tp4/5000mbit", "Tensor parallel over 4 ranks, link of 5 Gbit/s", _tp(4), ("longshore_direct", *_LINKED)),
        mbit=5000,
    ),
)
# In steps of their own
OTHERS = (
    Scene("tp2/kept", "Tensor parallel over 2 ranks, what keeping costs", _tp(2), (*_LIMITS, *_OURS, *_UNKEPT)),
    Scene("vllm1/http", "vLLM on the CPU, 1 rank", _tp(1), _VLLM),
    Scene("vllm2/http", "vLLM on the CPU, tensor parallel over 2 ranks", _tp(2), _VLLM),
    Scene(
        "transformers/http", "`from_pretrained`, 1 rank", _tp(1), ("longshore_transformers", "download_transformers")
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    patterns = [pattern.strip() for pattern in options.only.split(",")]
    for pattern in patterns:
        if not choose([pattern]):
            parser.error(f"argument --only: no contender and no scene is called {pattern!r}")
    entries = choose(patterns)
    chosen = {entry.scene for entry in entries}
    scenes = {scene.name: scene for scene in (*SCENES, *OTHERS) if scene.name in chosen}
    size_bytes = options.size or size(SMALL_SIZE if options.small else SIZE)
    rounds = options.rounds or (1 if options.small else ROUNDS)
    tuned = not (options.small or options.no_tuning)
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    folders = {"--out", "--tmpfs"}  # those of one machine
    given = " ".join(word for at, word in enumerate(words) if not folders & {*words[max(0, at - 1) : at + 1]})
    about: dict[str, Any] = {}
    try:
        with sigterm_interrupts(), run_folder(options.tmpfs, "longshore-bench-") as folder, sandbox():
            print(f"making the models ({size_bytes / 1e9:.2f} GB and a quarter) in {options.tmpfs}", flush=True)
            models = make_models(folder / "www", size_bytes)
            smaller = make_models(folder / "www", size_bytes // PART, PART_BUCKET)
            with RangeServer(folder / "www", folder / NGINX) as server, _linked(folder, scenes) as link:
                about = {
                    "machine": describe_machine(),
                    "versions": {**describe_versions(), "nginx": nginx_version()},
                    "model": {"bytes": models.model_bytes, "files": len(models.files)},
                    "rounds": rounds,
                    "command": f"python -m bench.run {given}".strip(),
                    "scenes": {name: {"title": scene.title, "ranks": scene.ranks} for name, scene in scenes.items()},
                    "tuned": tuned,
                }

                def run(entry: Entry, setting: Mapping[str, Any], *, whole: bool = True) -> list[Run]:
                    scene = scenes[entry.scene]
                    spec = _spec(scene, models if whole and scene.whole else smaller, server, link)
                    if whole and scene.whole and scene.source != "file":
                        spec = spec.with_options(part=smaller.model_bytes)
                    runs = run_once(entry, setting, spec)
                    if whole and scene.whole and not options.small:
                        _check_placement(entry, runs)
                    return runs

                tune = (lambda entry, setting: run(entry, setting, whole=False)) if tuned else None
                run_rounds(entries, rounds, run, tune=tune)
    except (NoRangeServer, NoRoom) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if any(entry.runs for entry in entries):
            _write(options.out, {**about, "partial": True}, entries)
            print("interrupted", flush=True)
        return 130
    _write(options.out, {**about, "partial": False}, entries)
    return 1 if any(entry.failure for entry in entries) else 0


def choose(patterns: Sequence[str]) -> list[Entry]:
    """Return the entries whose contender, scene or id matches a pattern, scene by scene."""
    return [
        entry
        for scene in (*SCENES, *OTHERS)
        for entry in entries_of((CONTENDERS[name] for name in scene.contenders), scene.name)
        if any(fnmatch.filter((entry.contender.name, entry.scene, entry.id), pattern) for pattern in patterns)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("bench.run", __doc__)
    # The defaults of --size and --rounds depend on --small.
    add_model_options(parser, None, None)
    loads = ",".join(scene.name for scene in SCENES)
    only = "patterns: 'longshore_*@tp4/http', 'tp8/http,tp4/*mbit', 'runai', 'vllm*/*'"
    parser.add_argument("--only", default=loads, help=only)
    small = f"see that it works: {SMALL_SIZE} instead of {SIZE}, 1 round instead of {ROUNDS}, no tuning"
    parser.add_argument("--small", action="store_true", help=small)
    parser.add_argument("--no-tuning", action="store_true", help="take the first setting of each contender")
    return parser


@contextlib.contextmanager
def _linked(folder: Path, scenes: Mapping[str, Scene]) -> Iterator[tuple[RateLimitedLink, RangeServer] | str]:
    """Run a server behind a link, for the scenes that need one. Yields the reason where there can be none."""
    if not any(scene.mbit for scene in scenes.values()):
        yield "no scene needs a link"
        return
    with contextlib.ExitStack() as stack:
        try:
            link = stack.enter_context(RateLimitedLink())
        except NoLink as error:
            yield str(error)
            return
        state, prefix = folder / f"{NGINX}-link", link.command_prefix
        server = RangeServer(folder / "www", state, host=link.address, command_prefix=prefix)
        yield link, stack.enter_context(server)


def _spec(scene: Scene, files: Spec, server: RangeServer, linked: tuple[RateLimitedLink, RangeServer] | str) -> Spec:
    """Return what a contender is given in that scene. Raises NotRunnable."""
    if scene.mbit:
        if isinstance(linked, str):
            raise NotRunnable(linked)
        link, server = linked
        link.limit(scene.mbit)
    spec = files.with_options(layout=scene.layout, ranks=scene.ranks, until_idle=True)
    if scene.source == "file":
        return spec
    if scene.source == "https":
        if not server.tls_endpoint:
            raise NotRunnable("openssl is not installed")
        spec = replace(spec, endpoint=server.tls_endpoint, ca_bundle=server.ca_bundle)
    else:
        spec = replace(spec, endpoint=server.endpoint)
    return replace(spec, source=scene.source).with_options(access_log=server.access_log)


def _check_placement(entry: Entry, runs: Sequence[Run]) -> None:
    """Refuse runs that had another placement than their contender asks for. Raises RunFailed.

    Ranks of a small model share every chunk, and what they share goes through the arena.
    """
    wanted = entry.contender.options.get("placement")
    for run in runs:
        if not run.case.startswith("part") and (had := run.extra.get("placement", wanted)) != wanted:
            raise RunFailed(f"asked for {wanted}, ran {had}: is the model too small?")


def _write(out: Path, about: Mapping[str, Any], entries: Sequence[Entry]) -> None:
    found = {**about, "entries": [entry.as_dict() for entry in entries]}
    write_json(out / "results.json", found)
    print("\n" + "\n\n".join(f"### {title}\n\n{table}" for title, table in load_tables(found).values()))
    print(f"\nwritten: {out}/results.json", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
