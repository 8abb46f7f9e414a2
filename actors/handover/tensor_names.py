"""From the names of a checkpoint to those of a module. Plain text: no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from cluster.errors import ConfigError, ModuleMismatch

Rename = Mapping[str, str | None] | Callable[[str], str | None] | None


def new_names(names: Iterable[str], prefix: str = "", rename: Rename = None) -> dict[str, str]:
    """New name -> name, of those that begin with `prefix`, which is taken off, then renamed.

    A mapping is of whole names, or of what names begin with up to a dot; the longest that fits counts:
    {"model": "model.language_model", "visual": "model.visual"}, {"model": ""} takes `model.` away. None, from a mapping
    or a function, leaves a tensor out. Raises ModuleMismatch when two names become one, ConfigError for what
    makes no names.
    """
    if not isinstance(prefix, str):
        raise ConfigError(f"prefix must be what names begin with, not {prefix!r:.60}")
    if rename is not None and not isinstance(rename, Mapping) and not callable(rename):
        raise ConfigError(f"rename must be a function or a mapping of names, not {rename!r:.60}")
    prefix = f"{prefix}." if prefix and not prefix.endswith(".") else prefix
    found: dict[str, str] = {}
    twice: list[str] = []
    for name in names:
        if not name.startswith(prefix):
            continue
        new = _renamed(name[len(prefix) :], rename)
        if new is None:
            continue
        if not isinstance(new, str):
            raise ConfigError(f"rename must make names or None: of {name!r:.200} it makes {new!r:.60}")
        if new in found:
            twice.append(f"{found[new]} and {name} -> {new}")
        found[new] = name
    if twice:
        raise ModuleMismatch(f"rename makes one name of several: {', '.join(twice[:20])}", clashes=len(twice))
    return found


def likely_prefix(missing: Iterable[str], offered: Iterable[str]) -> str:
    """The argument of `into` by which most of what is missing would be found in what was offered; "" when none does.

    "prefix='model'" where they are offered below that name, "rename=lambda name: 'model.' + name" the other way round.
    """
    wanted, there = set(missing), set(offered)
    for longer, shorter, how in (
        (there, wanted, "prefix={!r}"),
        (wanted, there, "rename=lambda name: {!r} + name"),
    ):
        count = Counter(
            name[:at] for name in longer for at in range(len(name)) if name[at] == "." and name[at + 1 :] in shorter
        )
        prefix, fitting = next(iter(count.most_common(1)), ("", 0))
        if 2 * fitting > len(wanted):
            return how.format(prefix if shorter is wanted else f"{prefix}.")
    return ""


def _renamed(name: str, rename: Rename) -> str | None:
    if rename is None:
        return name
    if not isinstance(rename, Mapping):
        return rename(name)
    if name in rename:
        return rename[name]
    at = name.rfind(".")
    while at > 0:
        if name[:at] in rename:
            target = rename[name[:at]]
            return f"{target}{name[at:]}" if target else target if target is None else name[at + 1 :]
        at = name.rfind(".", 0, at)
    return name
