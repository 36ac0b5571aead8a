"""The gateway's HTTP surface: paths, request ids, the key, and errors in one shape."""

import hmac
import re
import secrets
import time
from importlib.metadata import version

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from k3mesh.errors import EngineLost, Internal, MeshError, NotFound
from services.gateway.endpoint import GenerationEndpoint, Serving
from services.gateway.json_response import json_response
from services.gateway.openai.chat import Chat
from services.gateway.openai.completions import Completions
from services.gateway.openai.errors import Unauthorized, error_response, from_http
from services.gateway.text.template import ChatTemplate
from services.runtime.telemetry import log

REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Gateway:
    """The ASGI application."""

    def __init__(self, serving: Serving, template: ChatTemplate | None, api_key: str | None):
        self._serving = serving
        self._api_key = api_key
        self._created = int(time.time())
        self._router = Router(
            [
                Route("/v1/chat/completions", GenerationEndpoint(Chat(serving.tokenizer, template), serving), methods=["POST"]),
                Route("/v1/completions", GenerationEndpoint(Completions(serving.tokenizer), serving), methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", self._health),
                Route("/liveness", self._liveness),
                Route("/metrics", self._metrics),
                Route("/version", self._version),
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Every response carries X-Request-Id, and every error has OpenAI's shape."""
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope["state"] = {"request_id": request_id}
        scope["app"] = self  # with it the router raises its refusals instead of writing them as plain text
        begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        with bound_contextvars(request_id=request_id):
            try:
                self._authorise(scope["path"], headers)
                await self._router(scope, receive, send_with_id)
            except Exception as raised:
                error = _typed(raised, scope)
                if begun:  # the client sees that the response ends before its end
                    log.warning("a response was cut off", error=error.message)
                else:
                    await error_response(error)(scope, receive, send_with_id)

    def _authorise(self, path: str, headers: Headers) -> None:
        if not self._api_key or not path.startswith("/v1/"):
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._api_key.encode()):
            raise Unauthorized("the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")

    async def _models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._describe()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._serving.model_name:
            message = f"model {name!r} is not served here; this is {self._serving.model_name!r}"
            raise NotFound(message, param="model", detail="model_not_found")
        return json_response(self._describe())

    def _describe(self) -> dict[str, object]:
        model = self._serving.mesh.known_model
        limits = {"max_model_len": model.max_model_len} if model is not None else {}
        return {
            "id": self._serving.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "k3mesh",
            **limits,
        }

    async def _health(self, request: Request) -> Response:
        """200 if a request sent now would be served."""
        if self._serving.admission.draining:
            raise EngineLost("this gateway is shutting down")
        reason = await self._serving.mesh.not_ready()
        if reason is not None:
            raise EngineLost(f"not ready: {reason}")
        return json_response({"status": "ok"})

    async def _liveness(self, request: Request) -> Response:
        """200 as long as this process answers at all."""
        return json_response({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        inspections = await self._serving.mesh.inspect()
        return Response(self._serving.metrics.render(inspections), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _version(self, request: Request) -> Response:
        return json_response({"version": version("k3mesh")})


def _typed(raised: Exception, scope: Scope) -> MeshError:
    match raised:
        case MeshError():
            return raised
        case HTTPException():
            return from_http(raised, scope["method"], scope["path"])
        case _:
            log.error("a request failed on a defect", exc_info=raised)
            return Internal(f"the gateway failed: {type(raised).__name__}; its log has the traceback")
