"""The routes. FastAPI writes their OpenAPI; what they do is in `serving.service`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Header, Path, Query, Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from cluster.errors import NoCoordinator
from cluster.telemetry.report import ModelStatus
from cluster.telemetry.scale_report import ScaleReport
from cluster.telemetry.update_report import UpdateReport
from longshore.installation import __version__
from serving.access import Access, read_page
from serving.schemas import (
    MEDIA_TYPE,
    Begun,
    Change,
    Freed,
    Json,
    LoadBody,
    Models,
    PlanBody,
    Problem,
    ScaleBody,
    UpdateBody,
    problem,
    problem_of,
    status_of,
)
from serving.service import Busy, Service
from serving.settings import ServingSettings
from storage.errors import LongshoreError

LOOK_S = 1.0
QUIET_S = 15.0  # after that long a comment tells proxies that the line lives
OVER = ("failed", "released")
NAME = "longshore"
CONCURRENT = 448  # requests of one replica, beside its open streams
QUEUED = 200  # more than that wait for no place: Ray Serve says 503


def frame(kind: str, data: dict[str, Any], number: int | None = None) -> str:
    """One event, as the wire has it. JSON has no line ends outside of strings, and none inside."""
    head = "" if number is None else f"id: {number}\n"
    return f"{head}event: {kind}\ndata: {json.dumps(data)}\n\n"


async def stream(service: Service, model_id: str, after: int, *, until: str) -> AsyncIterator[str]:
    """Frames until the load is over, or `until` "ready" as soon as it is ready; an error ends it as an event too."""
    shown: dict[str, Any] = {}
    quiet_s = 0.0
    try:
        while True:
            events = await service.events(model_id, after, LOOK_S)
            for event in events:
                after = event.number
                yield frame(event.kind, event.as_dict(), event.number)
            now = await service.model(model_id)
            progress = {k: v for k, v in now.progress.as_dict().items() if k != "elapsed_s"}
            quiet_s = 0.0 if events or progress != shown else quiet_s + LOOK_S
            if progress != shown:
                shown = progress
                yield frame("progress", now.progress.as_dict())
            if _is_over(now, until) and not await service.events(model_id, after, 0):
                yield frame("end", {"state": now.progress.state, "error": now.error})
                return
            if quiet_s >= QUIET_S:
                quiet_s = 0.0
                yield ": still here\n\n"
    except asyncio.CancelledError:
        raise
    except LongshoreError as error:
        yield frame("error", {"status": int(status_of(error)), "kind": type(error).__name__, "detail": error.message})


def _is_over(now: ModelStatus, until: str) -> bool:
    return now.progress.state in OVER or (until == "ready" and now.progress.state == "ready")


ModelId = Annotated[str, Path(max_length=100, pattern=r"^[A-Za-z0-9._-]+$", examples=["llama-70b-3f9a21c4"])]
CHANGE_S = 2.0  # a change that is refused is refused by then
WaitS = Annotated[float, Query(ge=0, le=600, allow_inf_nan=False, description="seconds to wait for its end")]
_JSON_HINT = "send a JSON object, with the header content-type: application/json"
COMMON = (400, 401, 403, 408, 413, 422, 429, 500, 502, 503)


def _problems(*more: int) -> dict[int | str, dict[str, Any]]:
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {code: {"description": HTTPStatus(code).phrase, "content": content} for code in sorted({*COMMON, *more})}


def make_app(service: Service) -> FastAPI:
    """The application of one replica."""

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        lifespan=life,
        title="Longshore",
        version=__version__,
        summary="Loads model weights into a Ray cluster, every byte verified.",
        docs_url=None,  # both fetch their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        default_response_class=Json,
    )
    app.add_middleware(Access, settings=service.settings)
    _add_errors(app)
    _add_health(app, service)
    _add_models(app, service)
    _add_changes(app, service)
    _add_watching(app, service)
    _add_page(app)
    app.openapi = lambda: _with_problems(app)  # type: ignore[method-assign]
    return app


def _with_problems(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with the schema that every problem has: FastAPI knows models of its own media type only."""
    document = FastAPI.openapi(app)
    document["components"]["schemas"]["Problem"] = Problem.model_json_schema()
    return document


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(LongshoreError)
    async def known(request: Request, error: LongshoreError) -> Response:
        if isinstance(error, Busy):
            retry = {"retry-after": "5"}
            return problem(HTTPStatus.TOO_MANY_REQUESTS, "Busy", error.message, hint=error.hint, headers=retry)
        return problem_of(error)

    @app.exception_handler(RequestValidationError)
    async def not_as_the_schema(request: Request, error: RequestValidationError) -> Response:
        if (no_json := next((e for e in error.errors() if e["type"] == "json_invalid"), None)) is not None:
            at = f"{no_json['ctx']['error']}, at character {no_json['loc'][-1]}"
            return problem(HTTPStatus.BAD_REQUEST, "NoJson", f"the body is no JSON: {at}", hint=_JSON_HINT)
        wrong = [{"where": list(e["loc"]), "what": e["msg"]} for e in error.errors()[:50]]
        text = "the request is not as its schema says"
        whole = any(e["loc"] == ("body",) for e in error.errors())
        hint = _JSON_HINT if whole else ""
        return problem(HTTPStatus.UNPROCESSABLE_ENTITY, "BadRequest", text, hint=hint, errors=jsonable_encoder(wrong))

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        status = HTTPStatus(error.status_code)
        if status is HTTPStatus.BAD_REQUEST:  # FastAPI's, of a body that no parser gets through: not UTF-8, too deep
            return problem(status, "NoJson", "the body is no JSON", hint=_JSON_HINT)
        headers = dict(error.headers or {})
        return problem(status, status.phrase.title().replace(" ", ""), str(error.detail), headers=headers)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        return problem_of(error)


def _add_health(app: FastAPI, service: Service) -> None:
    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", summary="This process answers", tags=["health"])
    async def health() -> dict[str, str]:
        return {"status": "ok", "version": __version__}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", summary="The cluster can be asked for loads", tags=["health"], responses=_problems())
    async def ready() -> dict[str, str]:
        try:
            status = await service.status()
        except NoCoordinator:
            return {"status": "ok", "coordinator": "none yet: the first load starts it"}
        return {"status": "ok", "coordinator": status.coordinator_incarnation}


def _add_models(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/models:load",
        status_code=202,
        summary="Load a model and keep it resident",
        tags=["models"],
        response_model=Begun,
        responses={200: {"model": Begun, "description": "It was resident already"}, **_problems(404, 504)},
    )
    async def load(body: LoadBody) -> Json:
        now = await service.begin(body)
        ready = now.state == "ready"
        return Json(
            {"model_id": now.model_id, "state": now.state, "ready": ready},
            status_code=200 if ready else 202,
            headers={"location": f"/v1/models/{now.model_id}"},
        )

    @app.post(
        "/v1/models:plan",
        summary="What a load would put where, and whether it fits; moves no weights",
        tags=["models"],
        response_model=None,
        responses={200: {"content": {"application/json": {}, "image/svg+xml": {}}}, **_problems(404)},
    )
    async def plan(
        body: PlanBody, picture: Annotated[bool, Query(description="an SVG of ranks against layers")] = False
    ) -> Response:
        if picture:
            return Response(await service.picture(body), media_type="image/svg+xml")
        summary = await service.plan(body)
        return Json(jsonable_encoder(summary.as_dict()))

    @app.get("/v1/models", summary="Every model of the cluster", tags=["models"], responses=_problems())
    async def models() -> Models:
        status = await _or_none(service.status)
        return Models(
            models=[] if status is None else [model.as_dict() for model in status.models],
            ended=[] if status is None else [model.as_dict() for model in status.ended],
        )

    @app.get("/v1/models/{model_id}", summary="One model", tags=["models"], responses=_problems(404))
    async def model(model_id: ModelId) -> dict[str, Any]:
        found: dict[str, Any] = jsonable_encoder((await service.model(model_id)).as_dict())
        return found

    @app.get(
        "/v1/models/{model_id}/plan.svg",
        summary="What the model's load put where, as a picture of ranks against layers",
        tags=["models"],
        response_class=Response,
        responses={200: {"content": {"image/svg+xml": {}}}, **_problems(404)},
    )
    async def plan_of_model(model_id: ModelId) -> Response:
        return Response(await service.picture_of(model_id), media_type="image/svg+xml")

    @app.delete(
        "/v1/models/{model_id}",
        summary="Keep a model no longer: it is freed unless a process holds it; give a load up",
        tags=["models"],
        responses=_problems(404),
    )
    async def release(
        model_id: ModelId, force: Annotated[bool, Query(description="free it whoever holds it")] = False
    ) -> Freed:
        return Freed(**(await service.release(model_id, force=force)).as_dict())


def _add_changes(app: FastAPI, service: Service) -> None:
    begun: dict[int | str, dict[str, Any]] = {202: {"model": Change, "description": "It is under way"}}
    about: dict[str, Any] = {"tags": ["models"], "response_model": Change, "responses": {**begun, **_problems(404)}}

    @app.post(
        "/v1/models/{model_id}:update", summary="Give a model the contents of another revision, in place", **about
    )
    async def update(model_id: ModelId, body: UpdateBody, wait_s: WaitS = CHANGE_S) -> Json:
        return _change(model_id, await service.update(model_id, body, wait_s))

    @app.post(
        "/v1/models/{model_id}:scale",
        summary="Give a model another number of replicas, while its other ranks serve",
        **about,
    )
    async def scale(model_id: ModelId, body: ScaleBody, wait_s: WaitS = CHANGE_S) -> Json:
        return _change(model_id, await service.scale(model_id, body.data_parallel_size, wait_s))


def _change(model_id: str, outcome: UpdateReport | ScaleReport | str) -> Json:
    """Return the answer: the report of a change that is done, else what it does."""
    where = {"location": f"/v1/models/{model_id}"}
    if isinstance(outcome, str):
        return Json({"model_id": model_id, "done": False, "doing": outcome}, status_code=202, headers=where)
    report = jsonable_encoder(outcome.as_dict())
    return Json({"model_id": model_id, "done": True, "report": report}, headers=where)


def _add_watching(app: FastAPI, service: Service) -> None:
    open_streams = 0

    @app.get("/v1/cluster", summary="Models, nodes and idle workers", tags=["watching"], responses=_problems())
    async def cluster_status() -> dict[str, Any]:
        status = await _or_none(service.status)
        return {} if status is None else jsonable_encoder(status.as_dict())

    @app.get(
        "/v1/loads/{model_id}/chunks",
        summary="Where each chunk is, and where each node had its bytes from",
        tags=["watching"],
        response_model=dict[str, Any],
        responses=_problems(404),
    )
    async def chunks(model_id: ModelId) -> Json:
        return Json((await service.chunks(model_id)).as_dict())  # no encoder: it would look at every run

    @app.get(
        "/v1/loads/{model_id}/events",
        summary="What happens to a load, as server-sent events",
        tags=["watching"],
        response_model=None,
        responses={200: {"content": {"text/event-stream": {}}}, **_problems(404)},
    )
    async def events(
        model_id: ModelId,
        after: Annotated[int, Query(ge=0, le=1 << 53, description="number of the last event that was seen")] = 0,
        until: Annotated[Literal["over", "ready"], Query(description="when the stream ends")] = "over",
        last_event_id: Annotated[str | None, Header(pattern=r"^[0-9]{1,15}$")] = None,
    ) -> Response:
        nonlocal open_streams
        await service.model(model_id)
        if open_streams >= service.settings.streams:
            raise Busy("too many streams are open", hint="ask again later, or ask another replica")
        open_streams += 1  # nothing waits between this and the answer that gives it back

        def ended() -> None:
            nonlocal open_streams
            open_streams -= 1

        parts = stream(service, model_id, int(last_event_id or after), until=until)
        return _Stream(parts, ended)


class _Stream(StreamingResponse):
    """Calls `ended` when it is over, also when its client had gone before the first part."""

    def __init__(self, parts: AsyncIterator[str], ended: Callable[[], None]) -> None:
        super().__init__(parts, media_type="text/event-stream")
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


def _add_page(app: FastAPI) -> None:
    def add(path: str, data: bytes, media_type: str) -> None:
        @app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)
        async def part() -> Response:
            return Response(data, media_type=media_type)

    for path, (data, media_type) in read_page().items():
        add(path, data, media_type)


async def _or_none(ask: Callable[[], Awaitable[Any]]) -> Any:
    """None while no coordinator runs: then there are no models."""
    try:
        return await ask()
    except NoCoordinator:
        return None


def build(args: dict[str, Any] | None = None) -> Any:
    """Return the application for Ray Serve: `serve run serving.app:build`, an `import_path`, or `longshore serve`.

    Settings are those of the environment, then `args`, by their names. The token is read here, where the application
    is built, and only its digest goes to the replicas. Raises ConfigError.
    """
    from ray import serve

    settings = ServingSettings.from_env(**(args or {}))

    def make() -> Any:  # in each replica
        return make_app(Service(settings))

    make_deployment: Any = serve.deployment(
        name=NAME,
        max_ongoing_requests=CONCURRENT + settings.streams,
        max_queued_requests=QUEUED,
        ray_actor_options={"num_cpus": 0},
    )
    return make_deployment(serve.ingress(make)()).bind()
