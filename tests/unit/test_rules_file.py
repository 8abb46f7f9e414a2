"""Rules from a file of the user's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.command_line.cli import main
from cluster.errors import ConfigError
from cluster.layouts.rules import MAX_RULES, MAX_RULES_FILE_BYTES, Rule, read_rules
from cluster.options import LoadOptions
from cluster.request import make_request
from tests.support.checkpoints import safetensors_bytes

RULES = {"model.b.*.weight": "row", "model.a.weight": "column", "**": "replicate"}


@pytest.mark.parametrize("as_text", [True, False])
def test_a_rules_file_equals_the_same_mapping(tmp_path: Path, as_text: bool) -> None:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps(RULES))
    found = read_rules(str(path) if as_text else path)
    assert found == read_rules(RULES) == RULES
    assert list(found or {}) == list(RULES)  # the first match decides
    assert read_rules(None) is None


def test_a_request_has_the_rules_themselves(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps(RULES))
    request = make_request(LoadOptions(str(tmp_path), tensor_parallel_size=2, layout_rules=path))
    path.unlink()  # the planning process cannot read it
    assert request.layout_rules == RULES


def test_the_command_takes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = [("blocks.0.proj.weight", "BF16", (4, 4)), ("blocks.0.norm.weight", "BF16", (4,))]
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "rules.json"
    path.write_text('{"**.proj.weight": "row", "**.norm.weight": "replicate"}')
    assert main(["plan", str(tmp_path), "--tp", "2", "--layout-rules", str(path), "--json"]) == 0
    assert [rank["size_bytes"] for rank in json.loads(capsys.readouterr().out)["ranks"]] == [24, 24]
    assert main(["plan", str(tmp_path), "--tp", "2", "--layout-rules", str(tmp_path / "no.json")]) == 2
    assert "no.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 10_000, "larger"),
        (b"[" * 7_000, "not JSON"),
        (b"[]", "must map"),
        (b"null", "must map"),
        (b'{"a": "row", "a": "column"}', "appears twice"),
        (b'{"a": {"b": "row"}}', "no rule is called"),
        (b'{"a": "sideways"}', "no rule is called 'sideways'"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b" " * (MAX_RULES_FILE_BYTES + 1), "larger"),
        (json.dumps({str(n): "row" for n in range(MAX_RULES + 1)}).encode(), "more than"),
    ],
)
def test_files_that_hold_no_rules(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "rules.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=says) as caught:
        read_rules(path)
    assert "rules.json" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path, "a\0b"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_rules(path)


@given(st.dictionaries(st.from_regex(r"[a-z*\\\"é]{1,8}(\.[a-z]{1,3})?", fullmatch=True), st.sampled_from(list(Rule))))
def test_rules_in_a_mapping_or_in_a_file_read_the_same(
    tmp_path_factory: pytest.TempPathFactory, rules: dict[str, str]
) -> None:
    path = tmp_path_factory.mktemp("rules") / "r.json"
    path.write_text(json.dumps(rules))
    results = []
    for source in (rules, path):
        try:
            results.append(read_rules(source))
        except ConfigError as error:
            results.append(error.message.rpartition(": bad")[2].removeprefix("bad"))
    assert results[0] == results[1]


def test_a_rule_and_its_name_are_the_same_request() -> None:
    """Else a second load with the same rules would not get the resident model."""
    assert repr(read_rules({"a.*": Rule.ROW})) == repr(read_rules({"a.*": "row"})) == repr({"a.*": "row"})
