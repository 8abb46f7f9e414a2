"""The chart: a panel for each place that bytes come from and go to, bars of GB/s with what they cost in CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.results import OURS, Line, Results
from bench.tables import MEMORY_TITLES, SOURCE_TITLES, is_reference, ordered

_OURS, _RIVAL, _LIMIT = "#1b6ca8", "#b5651d", "#9aa5ad"
_BAR_INCHES = 0.3


def draw_chart(results: Results, path: Path) -> None:
    """Write the PNG. Raises ImportError where matplotlib is not installed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, list[Line]] = {}
    for line in ordered(line for line in results.lines if line.runs):
        title = f"{SOURCE_TITLES[line.source]}: {MEMORY_TITLES[line.case.memory]}"
        panels.setdefault(title, []).append(line)
    if not panels:
        return
    heights = [len(lines) + 1.5 for lines in panels.values()]
    figure, axes = pyplot.subplots(
        len(panels),
        1,
        squeeze=False,
        sharex=True,
        figsize=(11, 1.5 + _BAR_INCHES * sum(heights)),
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    fastest = max(line.gb_per_s_range[1] for lines in panels.values() for line in lines)
    for (title, lines), (axis,) in zip(panels.items(), axes, strict=True):
        _panel(axis, title, lines, results.ceiling(lines[0].source))
        axis.set_xlim(0, fastest * 1.2)
    axes[-1][0].set_xlabel("GB/s, median; whiskers: lowest and highest. Hatched: compares nothing with a digest.")
    model, machine = results.model, results.machine
    figure.suptitle(
        f"{model['bytes'] / 1e9:.2f} GB, {results.rounds} rounds; {machine['processor']}, {machine['cores']} cores, "
        f"store on the same machine; {machine['date']}",
        fontsize=9,
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _panel(axis: Any, title: str, lines: list[Line], ceiling: Line | None) -> None:
    places = list(range(len(lines)))[::-1]  # the first on top
    for place, line in zip(places, lines, strict=True):
        low, high = line.gb_per_s_range
        axis.barh(
            place,
            line.gb_per_s,
            height=0.7,
            color=_colour(line),
            hatch=None if line.case.checks else "///",
            edgecolor="white",
            xerr=[[line.gb_per_s - low], [high - line.gb_per_s]],
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
        )
        axis.annotate(
            f"{line.gb_per_s:.2f} GB/s, {line.cpu_s_per_gb:.2f} CPU s/GB",
            (high, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    if ceiling is not None:
        axis.axvline(ceiling.gb_per_s, color="#444444", linestyle="--", linewidth=0.8)
    axis.set_yticks(places, [line.title for line in lines], fontsize=7)
    axis.set_title(f"{title} (dashed: the ceiling)" if ceiling is not None else title, fontsize=9, loc="left")
    axis.spines[["top", "right"]].set_visible(False)


def _colour(line: Line) -> str:
    if line.contender.startswith(OURS):
        return _OURS
    return _LIMIT if is_reference(line) else _RIVAL
