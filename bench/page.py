"""The machine-written parts of the documentation, from the results: `python -m bench.page`.

    bench/out/*.json --> docs/benchmarks.json --> docs/benchmarks.md, docs/capacity.md: between `table: NAME` and `end`
                         (medians only)           docs/images/load_times.svg

A step that was not run again keeps its numbers, its date and its command. `--check` writes nothing and returns 1 where
the pages are not what the results say.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bench.everything import STEPS
from bench.harness.report import load_tables, markdown_table, ours, pairs
from bench.harness.rounds import REPOSITORY
from bench.options import new_parser
from bench.run import SCENES

DOCS = REPOSITORY / "docs"
PAGES = ("benchmarks.md", "capacity.md")
FIGURE, FIGURE_SCENE = "images/load_times.svg", "tp4/http"
_MARKED = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages and the figure. Returns the exit code."""
    parser = new_parser("bench.page", __doc__)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "bench" / "out", help="where the steps left results")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the pages")
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where a page is out of date")
    options = parser.parse_args(arguments)
    kept = options.docs / "benchmarks.json"
    results: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    if not options.check:
        results |= collect(options.out)
    files = {options.docs / name: fill((options.docs / name).read_text(), results) for name in PAGES}
    files |= {options.docs / FIGURE: figure(results["loads"]), kept: json.dumps(results, indent=1) + "\n"}
    changed = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in changed:
        print(f"{'out of date' if options.check else 'written'}: {path}")
        if not options.check:
            path.write_text(files[path])
    return 1 if options.check and changed else 0


def collect(out: Path) -> dict[str, Any]:
    """Return what the steps left, by name of the step, without single runs. Loads of some scenes only do not count."""
    found: dict[str, Any] = {}
    for name in STEPS:
        path = out / ("results.json" if name == "loads" else f"{name}.json")
        if path.exists():
            step = json.loads(path.read_text())
            if name == "loads" and len(step["scenes"]) < len(SCENES):
                print(f"not taken: {path} has only {', '.join(step['scenes'])}")
                continue
            for entry in step.get("entries", ()):
                del entry["runs"]
            found[name] = step
    return found


def fill(page: str, results: Mapping[str, Any]) -> str:
    """Return the page with its marked parts written anew. Raises KeyError for a name that no result has."""
    parts = marked_parts(results)
    return _MARKED.sub(lambda found: f"{found[1]}\n{parts[found[2]]}\n\n{found[4]}", page)


NOT_RUN = "There is no whole run of `make bench` with the present data path yet."


def marked_parts(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of every marked part, by name."""
    loads = results["loads"]
    model, machine = loads["model"], loads["machine"]
    warnings = {
        "The run was interrupted: rows are missing.": loads["partial"],
        "It was a small run, whose times are not shown.": "--small" in loads["command"],
        "Other programs kept the machine busy.": float(machine.get("load before", 0)) > 1,
    }
    note = "".join(f"**{text}**\n" for text, applies in warnings.items() if applies)
    note += "\n" if note else ""
    parts = {
        "run": f"{note}`{loads['command']}`: {pairs(machine)}. A Llama of {model['bytes'] / 1e9:.2f} GB in "
        f"{model['files']} shards, bf16; {loads['rounds']} rounds, interleaved; medians.\n\n"
        f"Versions: {pairs(loads['versions'])}.",
        "short": note + short_table(loads),
        "settings": _settings_table(loads),
        "cores": f"{note}From `{loads['command']}` of {machine['date']}.\n\n{cores_table(loads)}",
        "node": node_table(),
    }
    parts |= {name: table for name, (_, table) in load_tables(loads).items()}
    if loads["rounds"] < 3:
        parts["cores"] = "Not measured yet: the difference of two loads takes three rounds."
    if "--small" in loads["command"]:
        parts |= dict.fromkeys(("short", "settings", "cores", *load_tables(loads)), NOT_RUN)
    for name in STEPS:
        if "tables" in (step := results.get(name, {})):
            text = f"`{step['command']}`: {pairs(step['machine'])}; it took {step['seconds']:.0f} s."
            parts[name] = "\n\n".join([text, *step["tables"]])
        parts.setdefault(name, "Not measured yet.")
    return parts


def short_table(loads: Mapping[str, Any]) -> str:
    """Return the answers that the ratios of one run give, in Markdown."""
    cases = {entry["id"]: entry["cases"] for entry in loads["entries"]}
    rows = []
    for scene, warm_or_cold in (("tp4/http", "warm"), ("tp4/http", "cold"), ("fsdp4/http", "warm")):
        for name, words in (
            ("runai", "each rank reads all files with Run:ai's streamer"),
            ("obstore_whole", "each rank reads all tensors with obstore"),
            ("obstore_rows", "each rank reads only its rows with obstore"),
            ("download", "one download to tmpfs, then safetensors slices"),
        ):
            mine, other = ours(loads, scene, warm_or_cold), cases.get(f"{name}@{scene}", {}).get(warm_or_cold)
            if mine and other:
                what = f"{scene.partition('/')[0]}, {warm_or_cold}: {words}"
                rows.append((what, f"{other['wall_s'] / mine['wall_s']:.1f} times our time"))
    for scene, name in (("tp4/http", "arena"), ("fsdp4/http", "direct"), ("fsdp4/https", "direct")):
        mine, limit = (cases.get(f"{who}_{name}@{scene}", {}).get("warm") for who in ("longshore", "limit"))
        if mine and limit:
            ratios = [f"{mine[key] / limit[key]:.2f} times its {word}" for key, word in _COSTS.items()]
            rows.append((f"{scene}, warm: ours over the hand-written limit", ", ".join(ratios)))
    mine = cases.get("longshore_arena@tp4/http", {})
    if "warm" in mine and "warm_unverified" in mine:
        ratios = [f"{mine['warm'][key] / mine['warm_unverified'][key]:.2f} times the {_COSTS[key]}" for key in _COSTS]
        rows.append(("tp4/http, warm: ours verified with BLAKE3 over not verified", ", ".join(ratios)))
    for scene, mbit in (("tp4/1000mbit", 1000), ("tp4/5000mbit", 5000)):
        if one := ours(loads, scene, "warm"):
            rows.append((f"{scene}, warm: ours", f"{one['gb_per_s'] * 8e3 / mbit:.2f} of the link's rate"))
    return markdown_table(("question", "answer"), rows)


_COSTS = {"wall_s": "time", "cpu_s": "CPU"}


def _settings_table(loads: Mapping[str, Any]) -> str:
    found = {entry["contender"]: (entry["title"], entry["setting"]) for entry in reversed(loads["entries"])}
    rows = [(title, f"`{json.dumps(setting)}`") for title, setting in reversed(found.values()) if setting]
    return markdown_table(("contender", "best setting" if loads["tuned"] else "setting, not tuned"), rows)


# -- cores, link and memory that a node needs for a rate ---------------------------------------------------------
#
# A load costs processor seconds that do not depend on its size, and some for each GB. Both follow from warm loads of
# two sizes. The rest is arithmetic.

RATES_GB_S = (1.0, 5.0, 12.5, 50.0)
CONNECTION_GB_S = 0.1  # of one connection to the store
CHUNK_BYTES = 8 << 20
WIRE_BITS = 8 * 1538 / 1448  # bits on an Ethernet of 1,500-byte frames for each byte of an answer
# Bytes of memory traffic for each byte loaded: the card writes, the kernel's copy out of the socket reads and writes,
# the hash reads what is in the processor's cache, and a copy out of the arena reads and writes.
ARENA_TRAFFIC, DIRECT_TRAFFIC = 5, 3
# title, contender, scene and the suffix of its cases
PATHS = (
    ("through the arena, BLAKE3", "longshore_arena", "tp4/http", ""),
    ("through the arena, not verified", "longshore_arena", "tp4/http", "_unverified"),
    ("direct, BLAKE3", "longshore_direct", "fsdp4/http", ""),
    ("direct, not verified", "longshore_direct", "fsdp4/http", "_unverified"),
    ("through the arena, BLAKE3, TLS", "longshore_arena", "tp4/https", ""),
    ("direct, BLAKE3, TLS", "longshore_direct", "fsdp4/https", ""),
)


def cores_table(loads: Mapping[str, Any]) -> str:
    """Return the cores that each path keeps busy at each rate, in Markdown. Only paths measured with two sizes count.

    `loads`: as results.json has them.
    """
    cases = {entry["id"]: entry["cases"] for entry in loads["entries"]}
    rows = []
    for title, contender, scene, suffix in PATHS:
        found = cases.get(f"{contender}@{scene}", {})
        whole, part = found.get(f"warm{suffix}"), found.get(f"part{suffix}")
        if whole and part and whole["bytes"] > part["bytes"]:
            slope = (whole["cpu_s"] - part["cpu_s"]) / (whole["bytes"] - part["bytes"]) * 1e9  # CPU s/GB
            fixed_s = part["cpu_s"] - slope * part["bytes"] / 1e9
            rows.append((title, f"{fixed_s:.2f}", f"{slope:.2f}", *(f"{rate * slope:.1f}" for rate in RATES_GB_S)))
    cores = (f"cores at {rate:g} GB/s" for rate in RATES_GB_S)
    return markdown_table(("path", "CPU s a load", "CPU s/GB", *cores), rows)


def node_table() -> str:
    """Return link, requests and memory of a node at each rate, in Markdown."""
    rows = []
    for rate in RATES_GB_S:
        requests = max(1, round(rate / CONNECTION_GB_S))
        in_flight = f"{requests * CHUNK_BYTES / 2**30:.2f} GiB"
        traffic = f"{rate * ARENA_TRAFFIC:g} / {rate * DIRECT_TRAFFIC:g} GB/s"
        rows.append((f"{rate:g} GB/s", f"{rate * WIRE_BITS:.1f} Gbit/s", str(requests), in_flight, traffic))
    head = ("rate", "on the wire", "requests in flight", "chunks in flight", "memory traffic, arena / direct")
    return markdown_table(head, rows)


# -- the figure ------------------------------------------------------------------------------------------------

_WIDTH, _LEFT, _ROW, _TOP = 960, 500, 30, 64


def figure(loads: Mapping[str, Any]) -> str:
    """Return the seconds of warm loads in one scene as bars, in SVG."""
    entries = [entry for entry in loads["entries"] if entry["scene"] == FIGURE_SCENE]
    bars = []
    for entry in entries:
        if case := entry["cases"].get("warm"):
            checks = f"checked by {case['checks']}" if case["checks"] else "nothing checked"
            bars.append((case["wall_s"], f"{entry['title']}: {checks}", entry["contender"].partition("_")[0]))
    bars.sort()
    longest, height = max((bar[0] for bar in bars), default=1.0), _TOP + _ROW * len(bars) + 44
    size, machine = loads["model"]["bytes"] / 1e9, loads["machine"]
    title = f"Seconds to load {size:.2f} GB into 4 tensor-parallel ranks"
    under = (
        f"Warm processes and memory, plain HTTP, store and loader on the same {machine['cores']} cores, "
        f"{loads['rounds']} rounds, {machine['date']}."
    )
    fills = {"longshore": "#1f5fa8", "limit": "#9aa5b1"}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" role="img" aria-labelledby="title">',
        f'  <title id="title">{escape(title)}</title>',
        f'  <rect width="{_WIDTH}" height="{height}" rx="10" fill="#fff"/>',
        f'  <text x="20" y="36" font-size="17" font-weight="bold" fill="#222">{escape(title)}</text>',
    ]
    for number, (seconds, words, kind) in enumerate(bars):
        y, width = _TOP + number * _ROW, max(2, round((_WIDTH - _LEFT - 80) * seconds / longest))
        weight = ' font-weight="bold"' if kind == "longshore" else ""
        middle = y + 15
        lines += [
            f'  <text x="{_LEFT - 10}" y="{middle}" text-anchor="end" fill="#222"{weight}>{escape(words)}</text>',
            f'  <rect x="{_LEFT}" y="{y}" width="{width}" height="20" rx="3" fill="{fills.get(kind, "#d98a3d")}"/>',
            f'  <text x="{_LEFT + width + 8}" y="{middle}" fill="#222"{weight}>{seconds:.2f} s</text>',
        ]
    lines.append(f'  <text x="20" y="{height - 16}" fill="#555">{escape(under)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
