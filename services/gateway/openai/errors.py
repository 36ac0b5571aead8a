"""Errors as OpenAI's clients expect them: {"error": {message, type, param, code}} with the right HTTP status.

The mesh's own errors carry their HTTP status (k3mesh.errors). What only HTTP knows is added here.
"""

import math
from typing import Any, ClassVar

from starlette.exceptions import HTTPException
from starlette.responses import Response

from k3mesh.errors import BadRequest, EngineLost, MeshError, NotFound, Overloaded, Statuses
from services.gateway.json_response import json_response

RETRY_AFTER_S = 1.0  # what a client is told when the error itself names no time


class Unauthorized(BadRequest):
    code = "invalid_api_key"
    statuses: ClassVar[Statuses] = Statuses("UNAUTHENTICATED", 401, "authentication_error")


class MethodNotAllowed(BadRequest):
    code = "method_not_allowed"
    statuses: ClassVar[Statuses] = Statuses("UNIMPLEMENTED", 405, "invalid_request_error")


class BodyTimeout(BadRequest):
    code = "request_timeout"
    statuses: ClassVar[Statuses] = Statuses("DEADLINE_EXCEEDED", 408, "invalid_request_error")


class BodyTooLarge(BadRequest):
    code = "request_too_large"
    statuses: ClassVar[Statuses] = Statuses("RESOURCE_EXHAUSTED", 413, "invalid_request_error")


class UnsupportedMediaType(BadRequest):
    code = "unsupported_media_type"
    statuses: ClassVar[Statuses] = Statuses("INVALID_ARGUMENT", 415, "invalid_request_error")


class HeadersTooLarge(BadRequest):
    code = "request_header_fields_too_large"
    statuses: ClassVar[Statuses] = Statuses("RESOURCE_EXHAUSTED", 431, "invalid_request_error")


def error_body(error: MeshError) -> dict[str, Any]:
    """The JSON of an error; `code` is the finer one where the request itself was wrong."""
    code = error.detail if error.detail and isinstance(error, BadRequest | NotFound) else error.code
    return {"error": {"message": error.message, "type": error.statuses.openai_type, "param": error.param, "code": code}}


def error_headers(error: MeshError) -> dict[str, str]:
    """Retry-After, where trying again makes sense."""
    if isinstance(error, Overloaded | EngineLost):
        return {"retry-after": str(math.ceil(error.retry_after or RETRY_AFTER_S))}
    return {}


def error_response(error: MeshError) -> Response:
    return json_response(error_body(error), error.statuses.http, error_headers(error))


def from_http(error: HTTPException, method: str, path: str) -> MeshError:
    """What the router refuses: a path or a method that is not there."""
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return MethodNotAllowed(f"{method} {path}: this path takes {allowed} only")
    return NotFound(f"{method} {path}: there is no such path; see /v1/models, /v1/chat/completions, /v1/completions")


def first(error: BaseException) -> BaseException:
    """The first error inside the groups that task groups make."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
