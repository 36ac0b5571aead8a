"""The public error tree, and the one table from code to gRPC status, HTTP status and OpenAI type.

MeshError
├── BadRequest          the request can never be served as it is
├── NotFound            an unknown model or path
├── Overloaded          no room now; try again later
├── DeadlineExceeded    the request's time is up
├── Cancelled           the client went away or asked for the end
├── CapacityAborted     the decode cache is full and this request had to go (524)
├── TransferFailed      the handoff failed; `detail` is its PD_* code
├── EngineLost          an engine's process died or is not there
├── ConfigError         flags or files are wrong; raised before anything starts
└── Internal            a defect of k3mesh
"""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Statuses:
    """How one error code looks on each surface."""

    grpc: str  # name in grpc.StatusCode
    http: int
    openai_type: str


class MeshError(Exception):
    """Base of all errors that k3mesh raises on purpose.

    `message` is for a person: what went wrong, with which value, and what to do. `param` names the request field or
    flag at fault where there is one; `detail` a finer code.
    """

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    statuses: ClassVar[Statuses] = Statuses("INTERNAL", 500, "server_error")

    def __init__(self, message: str, *, detail: str = "", param: str | None = None, retry_after: float | None = None):
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.param = param
        self.retry_after = retry_after


class BadRequest(MeshError):
    code = "bad_request"
    statuses = Statuses("INVALID_ARGUMENT", 400, "invalid_request_error")


class NotFound(MeshError):
    code = "not_found"
    statuses = Statuses("NOT_FOUND", 404, "invalid_request_error")


class Overloaded(MeshError):
    code = "overloaded"
    retryable = True
    statuses = Statuses("RESOURCE_EXHAUSTED", 429, "rate_limit_error")


class DeadlineExceeded(MeshError):
    code = "deadline_exceeded"
    retryable = True
    statuses = Statuses("DEADLINE_EXCEEDED", 504, "timeout_error")


class Cancelled(MeshError):
    code = "cancelled"
    statuses = Statuses("CANCELLED", 499, "cancelled_error")


class CapacityAborted(MeshError):
    code = "capacity_aborted"
    retryable = True
    statuses = Statuses("RESOURCE_EXHAUSTED", 524, "server_error")


class TransferFailed(MeshError):
    code = "transfer_failed"
    retryable = True
    statuses = Statuses("UNAVAILABLE", 502, "server_error")


class EngineLost(MeshError):
    code = "engine_lost"
    retryable = True
    statuses = Statuses("UNAVAILABLE", 503, "server_error")


class ConfigError(MeshError):
    code = "config_error"
    statuses = Statuses("FAILED_PRECONDITION", 500, "server_error")


class Internal(MeshError):
    code = "internal"


BY_CODE: dict[str, type[MeshError]] = {
    kind.code: kind
    for kind in (
        BadRequest, NotFound, Overloaded, DeadlineExceeded, Cancelled,
        CapacityAborted, TransferFailed, EngineLost, ConfigError, Internal,
    )
}  # fmt: skip


def from_code(code: str, message: str, detail: str = "") -> MeshError:
    """The error that a peer reported; an unknown code (a newer peer) becomes Internal."""
    return BY_CODE.get(code, Internal)(message, detail=detail)
