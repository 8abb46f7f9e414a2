"""One parser under atheris: `python -m tests.fuzz.target PARSER [libFuzzer options] CORPUS`. See `tests.fuzz.run`.

An input that is neither taken nor refused with a typed, short error ends the process and is kept by libFuzzer.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["storage", "cluster", "tests.fuzz.parsers", "json"]):
    from tests.fuzz.parsers import PARSERS


def main() -> None:
    name = sys.argv.pop(1)
    parser = next(parser for parser in PARSERS if parser.name == name)

    def one_input(data: bytes) -> None:
        parser.check(data)

    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
