"""The bodies of requests and answers of the HTTP API. A request with an unknown field is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from http import HTTPStatus
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from cluster.errors import ClusterError, ConfigError, LoadError, LoadTimeout, ModelNotFound, PlanError
from cluster.options import (
    LOAD,
    DeviceName,
    DtypeName,
    FitMode,
    LoadOptions,
    PlacementName,
    about,
    collect,
    options_of,
)
from cluster.request import StoreOptions
from cluster.updating import UpdateOptions
from storage.errors import (
    AccessDenied,
    CheckpointError,
    IntegrityError,
    InvalidKey,
    InvalidUri,
    LongshoreError,
    ManifestError,
    ObjectNotFound,
    SourceRefused,
    StoreError,
    UnsupportedStore,
)

MAX_RANKS = 4096
Size = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Text = Annotated[str, Field(max_length=200)]


def _explained(*examples: dict[str, Any]) -> ConfigDict:
    """Return the configuration of a request's body with these examples, and for each option of a load its help."""

    def explain(schema: dict[str, Any]) -> None:
        schema["examples"] = list(examples)
        for one in options_of(LOAD):
            if one.name in schema["properties"]:
                schema["properties"][one.name].setdefault("description", about(one).help)

    return ConfigDict(extra="forbid", json_schema_extra=explain)


class SourceBody(BaseModel):
    """Options that say where a revision is read and which one is accepted.

    Not among them: credentials (those of the cluster's nodes are used), files and folders of the service's machine.
    """

    signed_name: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    endpoint_url: Annotated[str, Field(max_length=500)] | None = Field(
        None, description="of an S3-compatible server; only those that the operator allows"
    )
    region: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9-]+$")] | None = None


class ModelBody(SourceBody):
    """A model and how it is cut: the options of `cluster.load` that a caller from outside may set."""

    model_config = _explained(
        {"uri": "s3://models/llama-70b", "tensor_parallel_size": 8},
        {"uri": "s3://models/mixtral-8x7b", "tensor_parallel_size": 4, "fit": "auto", "dtype": "bfloat16"},
    )

    uri: str = Field(min_length=1, max_length=2048, description="s3://bucket/prefix, or another scheme that is allowed")
    anonymous: bool = False
    tensor_parallel_size: Size = 1
    fsdp_size: Size = 1
    data_parallel_size: Size = 1
    pipeline_parallel_size: Size = 1
    expert_parallel_size: Size = 1
    expert_tensor_parallel_size: int = Field(0, ge=0, le=MAX_RANKS)
    vocabulary_multiple: Size = 1
    dtype: DtypeName = "auto"
    quantization: Text | None = None
    skip_quantization: list[Text] | None = Field(None, max_length=100)
    layout_rules: dict[Text, Text] | None = Field(None, max_length=1000)
    device_map: Text | None = Field(None, description='"auto", "balanced", "sequential" or one device')
    max_memory: dict[Text, Text | int] | None = Field(None, max_length=64)
    fit: FitMode = "strict"
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    reserve_bytes: int | None = Field(None, ge=0, le=1 << 50)

    def options(self) -> LoadOptions:
        """Return the options of the load. Raises ConfigError."""
        return collect(LoadOptions, {**self.model_dump(), "model_uri": self.uri})


class LoadBody(ModelBody):
    """A model to load. It stays resident until it is deleted."""

    device: DeviceName = "auto"
    placement: PlacementName = "auto"
    wait_for_resources_s: float = Field(0, ge=0, le=86400, allow_inf_nan=False)
    timeout_s: float | None = Field(None, gt=0, le=86400, allow_inf_nan=False)


class PlanBody(ModelBody):
    """A model to plan: nothing is loaded."""

    memory: Annotated[str, Field(max_length=500)] | None = Field(None, description='"4x24GB"; none: nothing is weighed')
    host_memory: Text | None = None
    ranks_per_node: Size | None = None
    store_rate: Text | None = Field(None, description='"5GB/s", "40Gbit/s"')


class UpdateBody(SourceBody):
    """New contents for a resident model: the options of `cluster.update` that a caller from outside may set."""

    model_config = _explained({"uri": "s3://models/llama/step-2000"}, {"streaming": True})

    uri: Annotated[str, Field(min_length=1, max_length=2048)] | None = Field(
        None, description="folder of the new revision; none: the model's own, as it is stored now"
    )
    streaming: bool = Field(
        False, description="read into the tensors themselves: nothing is staged, and a failure breaks the model"
    )
    anonymous: bool | None = Field(None, description="send unsigned requests (public buckets); none: as for the model")

    def options(self) -> UpdateOptions:
        """Return the options of the update."""
        given = self.model_dump()
        return replace(collect(UpdateOptions, given), store=collect(StoreOptions, given))


class ScaleBody(BaseModel):
    """Another number of replicas for a resident model."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"data_parallel_size": 2}]})

    data_parallel_size: Size = Field(description="copies of the model, 1 or more")


class Change(BaseModel):
    """An update or a change of the number of replicas, which is done or under way."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model_id": "llama-70b-3f9a21c4", "done": False, "doing": "an update is planned"}]
        }
    )

    model_id: str
    done: bool
    doing: str = Field("", description="what it does now; GET /v1/models/{model_id} shows how it goes on and ends")
    report: dict[str, Any] | None = Field(None, description="as `longshore update --json` and `scale --json` show it")


class Begun(BaseModel):
    """A load that is under way, or a model that was resident already."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model_id": "llama-70b-3f9a21c4", "state": "planning", "ready": False}]}
    )

    model_id: str
    state: str
    ready: bool


class Freed(BaseModel):
    """The result of releasing a model."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model_id": "llama-70b-3f9a21c4", "freed": False, "holders": 2}]}
    )

    model_id: str
    freed: bool  # its memory is free
    holders: int  # processes that still hold it


class Models(BaseModel):
    """Every model that the cluster knows."""

    models: list[dict[str, Any]] = Field(description="as `longshore status --json` shows them")
    ended: list[dict[str, Any]] = Field(description="failed or released within the last five minutes")


class Problem(BaseModel):
    """RFC 9457."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "urn:longshore:problem:ModelNotFound",
                    "title": "Not Found",
                    "status": 404,
                    "detail": "no such model",
                    "hint": "longshore status lists the models of this cluster",
                    "details": {"model": "llama-70b-3f9a21c4"},
                }
            ]
        }
    )

    type: str
    title: str
    status: int
    detail: str
    hint: str = ""
    details: dict[str, Any] = {}
    errors: list[dict[str, Any]] = Field([], description="of a request that breaks the schema: what is wrong where")


MEDIA_TYPE = "application/problem+json"

# An error has the status of its nearest class in this table.
STATUS: dict[type[BaseException], HTTPStatus] = {
    ConfigError: HTTPStatus.UNPROCESSABLE_ENTITY,
    InvalidUri: HTTPStatus.UNPROCESSABLE_ENTITY,
    InvalidKey: HTTPStatus.UNPROCESSABLE_ENTITY,
    UnsupportedStore: HTTPStatus.UNPROCESSABLE_ENTITY,
    PlanError: HTTPStatus.UNPROCESSABLE_ENTITY,  # does not fit, cannot be cut
    CheckpointError: HTTPStatus.UNPROCESSABLE_ENTITY,
    ManifestError: HTTPStatus.UNPROCESSABLE_ENTITY,
    SourceRefused: HTTPStatus.FORBIDDEN,
    ModelNotFound: HTTPStatus.NOT_FOUND,
    ObjectNotFound: HTTPStatus.NOT_FOUND,
    AccessDenied: HTTPStatus.BAD_GATEWAY,  # the store refused us, not the caller
    StoreError: HTTPStatus.BAD_GATEWAY,
    IntegrityError: HTTPStatus.BAD_GATEWAY,
    ClusterError: HTTPStatus.SERVICE_UNAVAILABLE,
    LoadTimeout: HTTPStatus.GATEWAY_TIMEOUT,
    LoadError: HTTPStatus.INTERNAL_SERVER_ERROR,
    LongshoreError: HTTPStatus.INTERNAL_SERVER_ERROR,
}


class Json(JSONResponse):
    """In ASCII: names that others made up may hold what JSON can spell and UTF-8 cannot, and one such is no reason that
    nobody hears of the rest."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def status_of(error: BaseException) -> HTTPStatus:
    """500 for what nobody foresaw."""
    found = (STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    return next(found, HTTPStatus.INTERNAL_SERVER_ERROR)


def problem_of(error: BaseException) -> Response:
    """The answer to a request that ended with `error`. Of what nobody foresaw the caller learns the kind alone."""
    status = status_of(error)
    if not isinstance(error, LongshoreError):
        return problem(status, type(error).__name__, "something went wrong that was not foreseen; the log has it")
    details = json.loads(json.dumps(error.details, default=str), parse_constant=str)  # (NaN is no JSON)
    return problem(status, type(error).__name__, error.message, hint=error.hint, details=details)


def problem(
    status: HTTPStatus, kind: str, detail: str, *, headers: dict[str, str] | None = None, **more: Any
) -> Response:
    """`kind` names the problem for programs; members that are empty are left out."""
    body = {"type": f"urn:longshore:problem:{kind}", "title": status.phrase, "status": int(status), "detail": detail}
    return Json(
        {**body, **{name: value for name, value in more.items() if value}},
        status_code=int(status),
        headers=headers,
        media_type=MEDIA_TYPE,
    )
