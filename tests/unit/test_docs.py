"""The documents name what exists: settings, commands, options, Python names, files, links."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import longshore
from cluster.command_line.answers import EXIT_CODES
from cluster.command_line.cli import build_parser
from cluster.config import ENV_PREFIX, SERVICE_PREFIX, Config
from cluster.errors import ConfigError
from cluster.model import LoadedModel

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ROOMS = ("storage", "cluster", "actors", "serving")
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(DOCS.glob("*.md"))}
DOCUMENTS = {
    **PAGES,
    **{name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md")},
}
# The last word of a line of shell whose command is not ours.
END_OF_COMMAND = re.compile(r"\s(?:[|&;#>]|2>).*")


def blocks(text: str, *languages: str) -> Iterator[str]:
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
        if language in languages:
            yield block


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#{1,6} (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_settings_page_lists_every_setting_with_its_default() -> None:
    rows = dict(re.findall(rf"^\| `{ENV_PREFIX}(\w+)` \| (\S+) \| \S.* \|$", PAGES["docs/settings.md"], re.MULTILINE))
    assert rows == {name.upper(): str(field.default) for name, field in Config.model_fields.items()}


def test_the_command_page_lists_every_verb_and_exit_code() -> None:
    page = PAGES["docs/command_line.md"]
    verbs = set(re.findall(r"^    ([a-z]+)(?: |$)", build_parser().format_help(), re.MULTILINE))
    assert set(re.findall(r"^\| `longshore (\w+)[^|]*` \|", page, re.MULTILINE)) == verbs
    codes = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert codes == [(str(row.code), row.meaning) for row in EXIT_CODES]


def test_every_page_is_indexed_and_names_its_readers() -> None:
    linked = set(re.findall(r"\]\(([\w.]+\.md)\)", PAGES["docs/index.md"]))
    assert linked == {Path(name).name for name in PAGES} - {"index.md"}
    for name, text in PAGES.items():
        assert re.match(r"# .+\n\n\*For [^*]+[.]\*\n", text), name


def broken_links(name: str, text: str) -> Iterator[str]:
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", prose):
        path, _, anchor = link.partition("#")
        target = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            yield f"{name}: {link}"


def test_links_have_a_target() -> None:
    assert not [link for name, text in DOCUMENTS.items() for link in broken_links(name, text)]


def missing_files(name: str, text: str) -> Iterator[str]:
    for path in re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|yaml|yml|json|toml|txt))`", text):
        if "/out/" not in path and not any((root / path).exists() for root in (ROOT, ROOT / "tests")):
            yield f"{name}: {path}"


def missing_modules(name: str, text: str) -> Iterator[str]:
    for module, attribute in re.findall(r"`((?:storage|cluster|actors|serving)(?:\.[a-z]\w*)*)\.(\w+)`", text):
        found = importlib.import_module(module) if importlib.util.find_spec(module) else None
        if not hasattr(found, attribute) and not importlib.util.find_spec(f"{module}.{attribute}"):
            yield f"{name}: {module}.{attribute}"


def test_named_files_and_modules_exist() -> None:
    texts = {name: text for name, text in DOCUMENTS.items() if name != "CHANGELOG.md"}  # which names removed things
    assert not [path for item in texts.items() for path in (*missing_files(*item), *missing_modules(*item))]


def test_make_targets_and_settings_exist() -> None:
    text = "\n".join(DOCUMENTS.values())
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:^|`)make (\w[\w-]*)", text, re.MULTILINE)) <= set(targets)
    named = set(re.findall(rf"`({ENV_PREFIX}[A-Z_]*[A-Z])`", text))
    assert not Config.unknown_variables({name: "" for name in named if not name.startswith(SERVICE_PREFIX)})


def commands() -> Iterator[str]:
    """Return every command line of ours in a shell block or, whole, in the prose of a document."""
    for text in DOCUMENTS.values():
        for line in re.findall(r"(?<!\| )`(longshore [a-z][^`\[]*)`", text):
            if "..." not in line and len(line.split()) > 2:  # a verb alone is a name
                yield re.sub(r"\b(N|SECONDS)\b", "1", " ".join(line.split()))
        for block in blocks(text, "sh", ""):
            for line in block.replace("\\\n", " ").splitlines():
                if called := re.search(r"(?:^|\$ |-- |&& )(longshore [a-z].*)", line.strip()):
                    yield END_OF_COMMAND.sub("", called[1]).strip()


def test_documented_commands_parse() -> None:
    shown, refused = set(commands()), []
    for command in shown:
        try:
            build_parser().parse_args(shlex.split(command)[1:])
        except (ConfigError, SystemExit):
            refused.append(command)
    assert len(shown) > 30
    assert not refused


def unknown_arguments(example: ast.Module) -> Iterator[str]:
    for call in (node for node in ast.walk(example) if isinstance(node, ast.Call)):
        match call.func:
            case ast.Attribute(value=ast.Name(id="longshore" | "cluster"), attr=function):
                takes = inspect.signature(getattr(longshore, function)).parameters
            case ast.Attribute(value=ast.Name(id="model"), attr="iter_tensors" | "state_dict" | "release" as method):
                takes = inspect.signature(getattr(LoadedModel, method)).parameters
            case _:
                continue
        if not {word.arg for word in call.keywords} <= {*takes}:
            yield ast.unparse(call)


def test_python_examples_use_existing_arguments() -> None:
    examples = [block for text in DOCUMENTS.values() for block in blocks(text, "python")]
    assert not [call for block in examples for call in unknown_arguments(ast.parse(textwrap.dedent(block)))]


# PyPI has no longshore, so anybody could take the name there.
BY_NAME = re.compile(r"pip3? +install\b[^\n`]*?[ '\"]longshore(?![\w./-])")
TEXTS = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".sh", ".html", ".js", ".json", ""}
OTHERS = {"build", "dist", "site", "node_modules", "__pycache__"}  # folders that are not ours


def test_no_page_installs_longshore_by_name() -> None:
    wrong = ["pip install longshore", "pip install -U 'longshore[ray]'", 'pip install "longshore==1"']
    fine = ["pip install '.[ray]'", "pip install ./longshore-0.1.0-py3-none-any.whl"]
    assert [bool(BY_NAME.search(line)) for line in (*wrong, *fine)] == [True] * 3 + [False] * 2
    texts: dict[Path, str] = {}
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in OTHERS and not name.startswith(".")]
        paths = [Path(folder) / name for name in names]
        texts |= {path: path.read_text(errors="replace") for path in paths if path.suffix in TEXTS and path.is_file()}
    del texts[Path(__file__).resolve()]
    assert len(texts) > 300
    assert not [f"{path}: {found[0]}" for path, text in texts.items() if (found := BY_NAME.search(text))]


@cache
def extras() -> dict[str, list[str]]:
    found: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    return found


def test_every_extra_that_is_named_exists() -> None:
    code = "\n".join(path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    named = set(re.findall(r"install_hint\([\"'](\w+)[\"']\)", code))
    assert {"cluster", "serving", "signing", "completion", "demo"} <= named
    for text in DOCUMENTS.values():
        for several in re.findall(r"'\.\[([\w,]+)\]'", text):
            named |= set(several.split(","))
    assert named | {"gs", "az", "hf"} <= extras().keys()
