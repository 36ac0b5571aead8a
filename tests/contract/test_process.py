"""The life of a service process, seen from outside."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICE = """
import asyncio, sys
from k3mesh.errors import ConfigError, EngineLost
from services.runtime import process

class Arguments:
    @classmethod
    def parse(cls, argv):
        if argv == ["--bad"]:
            raise ConfigError("--bad: no such flag;\\nleave it out")
        return argv[0]

async def main(running, what):
    if what == "lost":
        raise EngineLost("rank 3 is gone")
    if what == "crash":
        async with asyncio.TaskGroup() as group:
            group.create_task(fall())
    running.ready()
    await running.stopping.wait()

async def fall():
    raise ZeroDivisionError("oops")

process.run("thing", main, Arguments)
"""


def start(argument: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SERVICE, argument]
    environment = {**os.environ, **environment}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def test_a_refused_flag_is_one_line_and_exit_2():
    process = start("--bad")
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (2, "error: --bad: no such flag; leave it out\n")


def test_a_lost_engine_is_exit_3_and_a_crash_exit_1_with_its_traceback_in_the_log():
    process = start("lost")
    assert process.communicate(timeout=20)[1].endswith("error: rank 3 is gone\n") and process.returncode == 3
    process = start("crash")
    errors = process.communicate(timeout=20)[1]
    assert (
        process.returncode == 1 and "ZeroDivisionError" in errors and errors.splitlines()[-1].startswith("error: thing crashed")
    )


def test_ready_is_told_and_sigterm_is_a_clean_end(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.settimeout(20)
        process = start("run", NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert supervisor.recv(1024) == b"READY=1"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
        assert process.returncode == 0


def test_a_watched_process_says_that_its_loop_turns_and_a_stopped_one_does_not(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.settimeout(20)
        process = start("run", NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="100000")
        assert [supervisor.recv(1024) for _ in range(4)] == [b"READY=1", *[b"WATCHDOG=1"] * 3]
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        supervisor.settimeout(0.5)
        with pytest.raises(TimeoutError):
            for _ in range(100):  # what was said before the stop, and no more
                supervisor.recv(1024)
        process.kill()
        process.communicate(timeout=20)


def test_a_child_does_not_outlive_its_supervisor(tmp_path: Path):
    supervisor = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SERVICE!r}, "run"], env={{**os.environ, "K3MESH_PARENT": str(os.getpid())}})
print(child.pid, flush=True)
sys.stdin.read()
"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(20)
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}
        command = [sys.executable, "-c", supervisor]
        parent = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert notify.recv(1024) == b"READY=1"
        descriptor = os.pidfd_open(child)
        parent.kill()
        parent.communicate(timeout=20)
        assert select.select([descriptor], [], [], 20)[0], "the child still runs"
        os.close(descriptor)
