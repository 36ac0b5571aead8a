"""`k3mesh chat`: talk to a mesh over its OpenAI HTTP door, tokens as they come."""

import argparse
import http.client
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from k3mesh.errors import ConfigError, EngineLost, MeshError

Message = dict[str, str]
READ_TIMEOUT_S = 600


def main(argv: list[str]) -> int:
    """Answer the given message, or each line of standard input in turn. The conversation is kept."""
    parser = _Parser(prog="k3mesh chat", description="Talk to a mesh; without MESSAGE, line by line.")
    parser.add_argument("message", metavar="MESSAGE", nargs="?")
    parser.add_argument("--url", help="the mesh's gateway; found through --state-dir if unset")
    parser.add_argument("--state-dir", default=".state", help="directory that `k3mesh up` was given (.state)")
    parser.add_argument("--api-key", default=os.environ.get("K3MESH_API_KEY", ""), help="or $K3MESH_API_KEY")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args(argv)
    url = arguments.url or url_of(arguments.state_dir)
    options = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    talk: list[Message] = []
    for line in [arguments.message] if arguments.message is not None else _lines():
        talk.append({"role": "user", "content": line})
        answer = ""
        for text in stream(url, talk, options, api_key=arguments.api_key):
            print(text, end="", flush=True)
            answer += text
        print()
        talk.append({"role": "assistant", "content": answer})
    return 0


def stream(
    url: str, messages: Sequence[Message], options: dict[str, Any], request_id: str = "", api_key: str = ""
) -> Iterator[str]:
    """Stream one chat completion: pieces of its text. MeshError with the server's own words if it fails."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(f"--url {url}: must be http://HOST:PORT", param="url")
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=READ_TIMEOUT_S)
    try:
        key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        model = json.load(_ask(connection, "GET", "/v1/models", headers=key))["data"][0]["id"]
        body = {"model": model, "messages": list(messages), "stream": True, **options}
        headers = key | {"Content-Type": "application/json"} | ({"X-Request-Id": request_id} if request_id else {})
        for line in _ask(connection, "POST", "/v1/chat/completions", json.dumps(body), headers):
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                return
            if data:
                chunk = json.loads(data)
                if "error" in chunk:
                    raise MeshError(chunk["error"]["message"])
                yield from (choice["delta"].get("content") or "" for choice in chunk["choices"])
        raise EngineLost(f"{url}: the stream ended early; see the gateway's log")
    except (OSError, http.client.HTTPException) as error:
        raise EngineLost(f"{url} does not answer ({error}); start a mesh with `k3mesh up`, or correct the address") from None
    finally:
        connection.close()


def url_of(state_dir: str) -> str:
    """The gateway of the mesh that was started with this state directory."""
    try:
        return str(json.loads((Path(state_dir) / "ports.json").read_text())["url"])
    except (OSError, ValueError, KeyError):
        raise ConfigError(f"--state-dir {state_dir}: no mesh was started there; give its directory, or --url") from None


def _ask(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: str | None = None,
    headers: dict[str, str] | None = None,
) -> http.client.HTTPResponse:
    connection.request(method, path, body, headers or {})
    response = connection.getresponse()
    if response.status != 200:
        text = response.read().decode(errors="replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            pass
        raise MeshError(f"{method} {path}: HTTP {response.status}: {text}")
    return response


def _lines() -> Iterator[str]:
    """Lines that a person types, with a prompt where there is a terminal; empty ones are skipped."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")
