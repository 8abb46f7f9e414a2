"""Schemathesis makes odd requests from the service's own OpenAPI document, against a real cluster."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the HTTP service's packages are not installed (longshore[serving])")
pytest.importorskip("schemathesis", reason="schemathesis is not installed (longshore[dev])")
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CHECKS

from cluster.config import Config
from serving.app import make_app
from serving.service import Service
from serving.settings import ServingSettings, digest_of
from tests.integration.test_serving import http_server
from tests.support.ray_clusters import Longshore

pytestmark = [pytest.mark.slow, pytest.mark.long]

TOKEN = "a-token-of-sufficient-length"
NOWHERE = ServingSettings(
    endpoints="http://127.0.0.1:9",  # no request leaves this machine
    buckets="models",
    token_sha256=digest_of(TOKEN),
    requests_per_minute=1_000_000,
)
CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
schema = schemathesis.openapi.from_dict(make_app(Service(NOWHERE, Config())).openapi())


@pytest.fixture(scope="module")
def url(connected: Longshore) -> Iterator[str]:
    connected.configure()
    with http_server(Service(NOWHERE, Config(), connected.address)) as place:
        yield place


@pytest.mark.parametrize("operation", [one.ok() for one in schema.get_all_operations()], ids=attrgetter("label"))
def test_every_operation_keeps_to_its_schema(operation: Any, url: str) -> None:
    """No 500, no answer that the document does not have, nothing taken that its schema refuses."""

    @given(operation.as_strategy())
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    def check(case: Any) -> None:
        answer = case.call(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"})
        case.validate_response(answer, checks=[CHECKS.get_one(name) for name in CHECKED])

    check()
