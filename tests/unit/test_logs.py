"""Lines of the log: one each, with fields, and never with a secret."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import Config
from cluster.errors import ConfigError
from cluster.scheduling.load_state import Life, LoadState
from cluster.telemetry.chunk_map import EventLog
from cluster.telemetry.logs import ROOT, JsonFormatter, LogFields, TextFormatter, configure_logs, log_events
from storage.problems import without_secrets
from storage.stores.object_store import MemoryStore
from tests.support.checkpoints import odd_objects
from tests.support.local_node import local_node, plan_of

FIELDS = LogFields("llama-1", 2, 3, 17, cause="reset")


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    root = logging.getLogger(ROOT)
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


def line(formatter: logging.Formatter, message: str, *args: object, fields: LogFields = FIELDS, **more: Any) -> str:
    record = logging.LogRecord("longshore.rank", logging.WARNING, "", 0, message, args, more.get("exc_info"))
    record.__dict__.update(fields.extra)
    return formatter.format(record)


def test_text_has_the_fields_before_the_message() -> None:
    text = line(TextFormatter(), "a try failed: %s", "no route")
    assert text.endswith(
        " WARNING longshore.rank load=llama-1 attempt=2 rank=3 chunk=17 cause=reset: a try failed: no route"
    )
    assert text[10] == "T"


def test_json_keeps_the_types_of_fields() -> None:
    said = json.loads(line(JsonFormatter(), "a try failed"))
    assert {name: said[name] for name in ("load", "attempt", "rank", "chunk", "cause", "level", "message")} == {
        "load": "llama-1",
        "attempt": 2,
        "rank": 3,
        "chunk": 17,
        "cause": "reset",
        "level": "WARNING",
        "message": "a try failed",
    }
    assert "node" not in said


@given(st.text(), st.text())
def test_a_message_with_line_breaks_stays_one_line(message: str, load: str) -> None:
    for formatter in (TextFormatter(), JsonFormatter()):
        text = line(formatter, "%s", message, fields=LogFields(load=load))
        assert len(text.splitlines()) == 1
        assert text.isprintable() or isinstance(formatter, JsonFormatter)


def test_bad_arguments_do_not_lose_the_line() -> None:
    class Unspeakable:
        def __str__(self) -> str:
            raise RuntimeError

    for message, argument in (("%d chunks", "many"), ("%s", Unspeakable())):
        said = json.loads(line(JsonFormatter(), message, argument))
        assert message in said["message"]
        assert said["chunk"] == 17


def test_an_exception_is_part_of_the_line() -> None:
    try:
        raise ValueError("token=abcdef12345")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    for formatter in (TextFormatter(), JsonFormatter()):
        text = line(formatter, "it broke", exc_info=info)
        assert "ValueError" in text
        assert "Traceback" in text
        assert "abcdef12345" not in text
        assert "\n" not in text


@pytest.mark.parametrize(
    "text",
    [
        "GET https://me:s3cr3t@host/a",
        "https://host/a?X-Amz-Signature=s3cr3t&x=1",
        "https://host/a?x=1&X-Amz-Security-Token=s3cr3t",
        "{'Authorization': 'AWS4-HMAC-SHA256 Credential=s3cr3t/2026, Signature=s3cr3t'}",
        "Authorization: Bearer s3cr3t",
        'aws_secret_access_key = "s3cr3t"',
        "secret_access_key='s3cr3t'",
        '{"session_token": "s3cr3t"}',
        "LONGSHORE_HTTP_TOKEN=s3cr3t",
        "password: s3cr3t",
        "https://me:p@s3cr3t@host/a",
        "password='two s3cr3t'",
        '{"SecretAccessKey": "two, s3cr3t"}',
        '"{\\"token\\": \\"s3cr3t\\"}"',
        "AccountName=a;AccountKey=s3cr3t==;EndpointSuffix=b",
        "'private_key': '-----BEGIN PRIVATE KEY-----\ns3cr3t\n-----END PRIVATE KEY-----'",
        "-----BEGIN RSA PRIVATE KEY-----\ns3cr3t",
        "Set-Cookie: session=s3cr3t",
        "403 for the token hf_s3cr3tabcdefghijklmnopqrstu",
    ],
)
def test_apparent_secrets_are_removed(text: str) -> None:
    assert "s3cr3t" not in without_secrets(text)
    assert "s3cr3t" not in line(JsonFormatter(), text.replace("%", "%%"), fields=LogFields(load=text))


@pytest.mark.parametrize(
    "text", ["s3://models/llama-70b", "12 tokens a second", "hf_xet", "a-hf_model", "no signature by a trusted key"]
)
def test_other_words_are_kept(text: str) -> None:
    assert without_secrets(text) == text


def test_log_settings_come_from_the_configuration() -> None:
    assert Config().logs == ("text", "INFO")
    assert Config.from_env({"LONGSHORE_LOG_FORMAT": "json", "LONGSHORE_LOG_LEVEL": "debug"}).logs == ("json", "DEBUG")
    with pytest.raises(ConfigError, match="LONGSHORE_LOG_FORMAT"):
        Config.from_env({"LONGSHORE_LOG_FORMAT": "xml"})


def test_the_last_log_configuration_wins() -> None:
    first, second, log = io.StringIO(), io.StringIO(), logging.getLogger("longshore.test")
    configure_logs(("text", "INFO"), first)
    log.info("one")
    configure_logs(("", ""), second)
    configure_logs(("json", "WARNING"), second)
    log.info("two")
    log.warning("three", extra=LogFields(rank=1).extra)
    assert "one" in first.getvalue()
    assert "three" not in first.getvalue()
    assert [json.loads(text)["message"] for text in second.getvalue().splitlines()] == ["three"]


def test_the_log_level_follows_the_severity_of_an_event() -> None:
    stream, events = io.StringIO(), EventLog()
    configure_logs(("json", "DEBUG"), stream)
    life = Life.new(1)
    events.moved(0.0, life, Life(LoadState.LOADING, 1, life.ranks), {0: "a"})
    events.moved(0.0, life, Life(LoadState.FAILED, 1, life.ranks, "no such object"), {0: "a"})
    events.add(0.0, "rank_lost", "its worker is gone", rank=0, host="a")
    events.add(0.0, "rank_ready", "it holds all its slices", rank=0, host="a")
    log_events(logging.getLogger("longshore.load"), "llama-1", 1, events.after(0))
    said = [json.loads(text) for text in stream.getvalue().splitlines()]
    assert [one["level"] for one in said] == ["INFO", "ERROR", "WARNING", "DEBUG"]
    assert {(one["load"], one["attempt"]) for one in said} == {("llama-1", 1)}
    assert (said[2]["rank"], said[2]["node"], said[2]["event"]) == (0, "a", "rank_lost")
    assert "no such object" in said[1]["message"]


def test_a_damaged_chunk_is_logged_with_its_place(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    objects = odd_objects()

    class Flips(MemoryStore):
        flipped = False

        def read_into(self, *args: Any, **more: Any) -> Any:
            answer = super().read_into(*args, **more)
            if not Flips.flipped:
                Flips.flipped = True
                args[2][:1] = bytes([args[2][0] ^ 1])
            return answer

    with local_node(tmp_path, 8) as node, caplog.at_level(logging.DEBUG, "longshore"):
        node.load(plan_of(objects), Flips(dict(objects)))
    (record,) = [record for record in caplog.records if record.name == "longshore.rank"]
    assert record.levelname == "WARNING"
    fields = record.__dict__
    assert (fields["load"], fields["attempt"], fields["rank"], fields["cause"]) == ("load-1", 1, 0, "digest_mismatch")
    assert isinstance(fields["chunk"], int)
