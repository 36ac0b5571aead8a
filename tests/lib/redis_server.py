"""A redis-server of the test's own, on a Unix socket."""

import subprocess
import time
from pathlib import Path

import redis


class RedisServer:
    """Starts, stops and starts again with its data kept."""

    def __init__(self, folder: Path):
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it answers."""
        place = ["--port", "0", "--unixsocket", str(self.socket), "--dir", str(self._folder)]
        flags = [*place, "--appendonly", "yes", "--save", ""]
        self._process = subprocess.Popen(["redis-server", *flags], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    assert time.monotonic() < deadline and self._process.poll() is None, "redis-server does not start"
                    time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)
            self._process = None

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, decode_responses=True)
