"""Docstrings of public functions cover every parameter, the result, the errors, and the name is on a page."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cluster

PAGES = Path(__file__).resolve().parents[2] / "docs/api"
SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Example):\n((?:    .*\n|\n)*)", re.MULTILINE)
ENTRY = re.compile(r"^(?:\*{0,2})(\w+): \S", re.MULTILINE)


def is_async_twin(name: str) -> bool:
    """Return whether this is `aload` of a `load`: the same parameters, and a docstring that names the other.

    `asave` is no coroutine function. It returns a handle.
    """
    return name[0] == "a" and name != "asave" and hasattr(cluster, name[1:])


def is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Return the functions that `cluster` exports, and the methods that its exported classes define."""
    for name in cluster.__all__:
        value = getattr(cluster, name)
        if inspect.isfunction(value) and not is_async_twin(name):
            yield name, value
        elif inspect.isclass(value) and not is_error(value):
            for method in vars(value):
                function = getattr(value, method)
                twin = method[0] == "a" and hasattr(value, method[1:])
                if method[0] != "_" and not twin and inspect.isroutine(function):
                    yield f"{name}.{method}", inspect.unwrap(function)


def missing_from(name: str, function: Callable[..., Any]) -> Iterator[str]:
    """Return the parts that the function's docstring lacks."""
    sections = {found[1]: textwrap.dedent(found[2]) for found in SECTION.finditer(f"{inspect.getdoc(function)}\n")}
    signature = inspect.signature(function)
    documented = ENTRY.findall(sections.get("Args", ""))
    parameters = [each for each in signature.parameters if each not in ("self", "cls")]
    yield from (f"{name}: {each} is not under Args" for each in parameters if each not in documented)
    yield from (f"{name}: {each} is under Args, and no parameter" for each in documented if each not in parameters)
    # A method without parameters states in its first line what it returns.
    if (parameters or "." not in name) and signature.return_annotation != "None" and "Returns" not in sections:
        yield f"{name}: no Returns"
    raises = "." not in name or re.search(r"^\s+raise ", inspect.getsource(function), re.MULTILINE)
    if raises and not ENTRY.search(sections.get("Raises", "")):
        yield f"{name}: no Raises"


def test_docstrings_name_every_parameter_and_error() -> None:
    functions = dict(public_functions())
    assert {"load", "plan", "host_rank", "publish", "LoadedModel.call", "Config.from_env"} <= functions.keys()
    assert [line for name, function in functions.items() for line in missing_from(name, function)] == []


def test_docstrings_name_errors_that_exist() -> None:
    unknown = []
    for name, function in public_functions():
        for title, text in SECTION.findall(f"{inspect.getdoc(function)}\n"):
            if title == "Raises":
                unknown += [
                    f"{name}: {each}" for each in ENTRY.findall(textwrap.dedent(text)) if each not in cluster.__all__
                ]
    assert unknown == []


def test_missing_parts_of_a_docstring_are_found() -> None:
    def incomplete(there: int, missing: int) -> int:
        """Return a number.

        Args:
            there: A number.
            gone: Another one.
        """
        raise ValueError

    assert list(missing_from("incomplete", incomplete)) == [
        "incomplete: missing is not under Args",
        "incomplete: gone is under Args, and no parameter",
        "incomplete: no Returns",
        "incomplete: no Raises",
    ]


def test_every_public_name_is_on_a_page() -> None:
    shown = re.findall(
        r"^::: cluster\.(\w+)$", "\n".join(page.read_text() for page in PAGES.glob("*.md")), re.MULTILINE
    )
    assert len(shown) == len(set(shown))
    assert {name for name in cluster.__all__ if name != "__version__" and not is_async_twin(name)} == set(shown)
