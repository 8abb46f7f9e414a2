"""Arguments that cannot work are refused in one line, with exit code 2, before anything begins."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

from bench.options import output_folder, size

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "command",
    [
        "bench.gpu --rounds 0",
        "bench.gpu --size 0",
        "bench.gpu --out /proc/nothing",
        "bench.gpu --only nosuch",
        "bench.everything --steps loads,nosuch",
        "bench.hashes --rounds 0",
        "bench.hashes --seconds 0",
        "bench.hashes --seconds nan",
        "bench.simulate --nic 0",
        "bench.simulate --slow 0",
        "bench.simulate --threads 0",
        "bench.simulate --nodes 0",
        "bench.simulate --layers 0",
        "bench.simulate --arena-slots 16",
        "bench.simulate --ranks-per-node 3 --layers 1 --nodes 1",
        "bench.peers --nodes 1,none",
        "bench.peers --nodes 0",
        "bench.peers --mbit 0",
        "bench.plan_scale --layout foo",
        "bench.plan_scale --layout 8x0x1",
        "bench.plan_scale --layers 0",
        "bench.startup --rounds 0",
        "bench.run --only nosuch",
        "bench.run --only longshore_*,tp3/http",
        "bench.run --rounds -1",
        "bench.run --rounds 0",
        "bench.run --size 0",
        "bench.run --out /proc/nothing",
    ],
)
def test_impossible_arguments_are_refused_in_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, *arguments = command.split()
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module).main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    last = said.err.splitlines()[-1]
    assert last.startswith(f"python -m {module}: error: ")
    assert len(last) < 320


def test_sizes_take_the_same_units_as_everywhere() -> None:
    assert size("2GB") == 2_000_000_000
    assert size("3 MiB") == 3 << 20
    for wrong in ("0", "two", "-1"):
        with pytest.raises(ValueError, match=wrong):
            size(wrong)


def test_a_missing_output_folder_is_created(tmp_path: Path) -> None:
    assert output_folder(str(tmp_path / "a" / "b")).is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(argparse.ArgumentTypeError, match="cannot make"):
        output_folder(str(tmp_path / "file" / "c"))
