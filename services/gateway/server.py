"""HTTP/1.1 by uvicorn, with a bound on request heads, JSON for what is no HTTP at all, and an end without polling."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httptools
import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from k3mesh.errors import BadRequest, ConfigError
from services.gateway.openai.errors import HeadersTooLarge, error_body

MAX_HEADERS, MAX_HEAD_BYTES = 256, 64 << 10
BACKLOG = 1024
SOCKET_OPTIONS = [  # accepted connections inherit them
    (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),  # a client that vanished without a word is noticed while its request waits
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000),  # and one that takes nothing does not keep its last bytes here
]
LINGER_S = 2.0  # a refused client may still be sending: closing at once would destroy the answer on its way
DATE_REFRESH_S = 1.0
CLOSE_TIMEOUT_S = 5
KEEP_ALIVE_S = 75  # longer than clients and balancers keep an idle connection, so that none sends into our close


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; ConfigError if the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        for level, option, value in SOCKET_OPTIONS:
            listener.setsockopt(level, option, value)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: the address cannot be bound ({error.strerror}); choose a free port", param="port"
        ) from error
    listener.setblocking(False)
    return listener


class HttpProtocol(HttpToolsProtocol):
    """One connection. Head and trailers beyond the bounds are refused while they arrive, so they are never held whole."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._header_bytes = 0
        self._held_bytes = 0  # received since the parser last had a whole part of a message to give
        self._progress = False
        self._too_large = False
        self._refused = False

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._progress = False
        super().data_received(data)
        self._held_bytes = 0 if self._progress else self._held_bytes + len(data)
        if self._held_bytes > MAX_HEAD_BYTES and not self._refused:
            self._too_large = True
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._header_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if len(self.headers) >= MAX_HEADERS or self._header_bytes > MAX_HEAD_BYTES:
            self._too_large = True
            raise httptools.HttpParserError("the head is too large")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._progress = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._progress = True
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser refused, and close. While an earlier request is being answered: only close."""
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        if self._too_large:
            error: BadRequest = HeadersTooLarge(f"the headers exceed {MAX_HEADERS} fields or {MAX_HEAD_BYTES >> 10} KiB")
        else:
            error = BadRequest("this is not a valid HTTP/1.1 request", detail="invalid_http")
        body = orjson.dumps(error_body(error))
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.statuses.http] + head + body)
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


class HttpServer(uvicorn.Server):
    """Serves one application on a bound socket until `stop()`."""

    def __init__(self, app: ASGIApp, listener: socket.socket, on_started: Callable[[], None]):
        config = uvicorn.Config(
            app,
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            log_level="critical",  # the application logs its own errors
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        super().__init__(config)
        self._listener = listener
        self._on_started = on_started
        self._stop = asyncio.Event()

    async def run_until_stopped(self) -> None:
        await self.serve([self._listener])

    def stop(self) -> None:
        """Take no new connections, let the open ones end."""
        self._stop.set()

    async def main_loop(self) -> None:
        self._on_started()
        while not self._stop.is_set():
            await self.on_tick(0)  # refreshes the Date header
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_REFRESH_S):
                    await self._stop.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's own."""
        yield
