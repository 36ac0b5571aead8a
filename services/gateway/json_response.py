"""JSON over HTTP, by orjson."""

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, dict(headers or {}), media_type="application/json")
