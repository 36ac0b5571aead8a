"""A Redis for one test."""

from pathlib import Path

import pytest

from tests.lib.redis_server import RedisServer


@pytest.fixture
def journal(tmp_path: Path):
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()
