"""The supervisor with tiny real processes: order, causes, restarts, and that nothing outlives it."""

import asyncio
import contextlib
import dataclasses
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from k3mesh.errors import MeshError
from services.launch import child as children
from services.launch import supervisor as supervising
from services.launch.child import ROOT, Spec
from services.launch.state import StateDir
from services.launch.supervisor import Group, Supervisor
from tests.lib.mesh import short_folder

# argv: name and journal, then what to do, one word after the other
TINY = """
import os, signal, socket, subprocess, sys
name, journal = sys.argv[1:3]

def tell(text):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.sendto(text.encode(), os.environ["NOTIFY_SOCKET"])

def note(text):
    with open(journal, "a") as file:
        file.write(f"{text} {name}\\n")

def end(number, frame):
    note("end")
    os._exit(0)

signal.signal(signal.SIGTERM, end)
note("start")
for word in sys.argv[3:]:
    verb, _, value = word.partition("=")
    if verb == "ready": note("ready"); tell("READY=1")
    if verb == "beat": tell("WATCHDOG=1")
    if verb == "status": tell("STATUS=" + value)
    if verb == "exit": sys.exit(int(value))
    if verb == "print": print(value, flush=True)
    if verb == "wait": open(value).read()
    if verb == "stubborn": signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if verb == "fork": note(f"child {subprocess.Popen(['sleep', '1000']).pid}")
signal.pause()
"""


@pytest.fixture
def folder():
    with short_folder() as folder:
        yield folder


class Setting:
    """Builds groups of tiny processes over one state directory."""

    def __init__(self, folder: Path):
        self.state = StateDir(folder / "state")
        self.state.create()
        self.journal = folder / "journal"
        self.journal.touch()
        self.stopping = asyncio.Event()
        self.ready = asyncio.Event()

    def spec(self, name: str, *words: str, stop_order: int = 0, grace: float = 20) -> Spec:
        command = (sys.executable, "-S", "-c", TINY, name, str(self.journal), *words)
        return Spec(name, command, stop_order, grace)

    def group(self, name: str, *specs: Spec, timeout: float = 60) -> Group:
        return Group(name, specs, self.state, timeout)

    def lines(self) -> list[str]:
        return self.journal.read_text().splitlines()

    async def started(self) -> None:
        self.ready.set()

    def run(self, *stages: list[Group]) -> asyncio.Task[None]:
        return asyncio.ensure_future(Supervisor(stages).run(self.stopping, self.started))

    async def stop(self, task: asyncio.Task[None]) -> None:
        self.stopping.set()
        await task


@pytest.fixture
def setting(folder: Path) -> Setting:
    return Setting(folder)


async def wait_for_line(setting: Setting, line: str, count: int = 1) -> None:
    async with asyncio.timeout(30):
        while setting.lines().count(line) < count:
            await asyncio.sleep(0.02)


async def test_a_stage_starts_when_the_one_before_is_ready_and_stops_in_stop_order(setting: Setting):
    first = setting.group("a", setting.spec("a", "ready", stop_order=2))
    second = setting.group("b", setting.spec("b1", "ready", stop_order=1), setting.spec("b2", "ready", stop_order=0))
    running = setting.run([first], [second])
    await setting.ready.wait()
    lines = setting.lines()
    assert max(lines.index("start a"), lines.index("ready a")) < min(lines.index("start b1"), lines.index("start b2"))
    await setting.stop(running)
    assert setting.lines()[-3:] == ["end b2", "end b1", "end a"]
    assert setting.state.processes() == {} and list(setting.state.run.iterdir()) == []


async def test_the_root_cause_of_a_failed_start_is_told_and_nothing_is_left(setting: Setting):
    consequence = setting.spec("peer", "status=error: rank 1 is gone", "exit=3")
    cause = setting.spec("rank-1", "status=error: --rank 1: is wrong; correct it", "exit=2")
    other = setting.group("other", setting.spec("other"))
    with pytest.raises(MeshError, match=r"rank-1 failed: --rank 1: is wrong; correct it; its log is .*rank-1\.log"):
        await setting.run([setting.group("engine", consequence, cause), other])
    assert setting.state.processes() == {} and not setting.ready.is_set()


async def test_a_child_without_last_words_is_told_by_code_and_last_log_line(setting: Setting):
    with pytest.raises(MeshError, match=r"a exited with code 7 after 'out of paper'; its log is"):
        await setting.run([setting.group("a", setting.spec("a", "print=out of paper", "exit=7"))])


async def test_a_program_that_is_not_there_is_told_by_name(setting: Setting):
    with pytest.raises(MeshError, match=r"a cannot be started .*no-such-program"):
        await setting.run([setting.group("a", Spec("a", ("no-such-program",), 0))])


async def test_a_missed_deadline_names_who_was_late_and_what_it_last_said(setting: Setting):
    late = setting.spec("late", "status=loading layer 3")
    with pytest.raises(MeshError, match=r"engine did not start within 1 s: late is not ready: loading layer 3; its log is"):
        await setting.run([setting.group("engine", setting.spec("early", "ready"), late, timeout=1)])
    assert setting.state.processes() == {}


async def test_a_lost_member_restarts_its_whole_group_and_no_other(setting: Setting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervising, "BACKOFF_S", (0.0,))
    engine = setting.group("engine", setting.spec("p1", "ready"), setting.spec("p2", "ready"))
    running = setting.run([engine, setting.group("gateway", setting.spec("gateway", "ready"))])
    await setting.ready.wait()
    before = setting.state.processes()
    os.kill(before["p2"], signal.SIGKILL)
    await wait_for_line(setting, "ready p1", count=2)
    await wait_for_line(setting, "ready p2", count=2)
    after = setting.state.processes()
    assert after["gateway"] == before["gateway"]
    assert after["p1"] != before["p1"] and after["p2"] != before["p2"]
    await setting.stop(running)


async def test_a_group_that_dies_again_and_again_ends_everything_with_the_cause(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(supervising, "BACKOFF_S", (0.0,))
    monkeypatch.setattr(supervising, "SETTLE_S", 0.05)
    sick = setting.group("sick", setting.spec("sick", "ready", "print=no more", "exit=1"))
    with pytest.raises(MeshError, match=r"sick was restarted 5 times within 60 s of life; the last time .*'no more'"):
        await setting.run([sick, setting.group("well", setting.spec("well", "ready"))])
    assert setting.lines().count("start sick") == 6 and setting.lines().count("end well") == 1


async def test_a_child_that_has_beaten_and_falls_silent_is_killed_as_one_that_hangs(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(children, "BEAT_S", 0.05)
    monkeypatch.setattr(supervising, "BACKOFF_S", (0.0,))
    monkeypatch.setattr(supervising, "SETTLE_S", 0.05)
    engine = setting.group("engine", setting.spec("hung", "ready", "beat"), setting.spec("peer", "ready"))
    with pytest.raises(MeshError, match=r"the last time hung hung: it was silent for 0.1 s and was killed; its log is"):
        await setting.run([engine, setting.group("never beats", setting.spec("other", "ready"))])
    assert setting.lines().count("start peer") == 6 and setting.lines().count("start other") == 1


async def test_a_program_that_does_not_answer_its_probe_is_killed(setting: Setting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(children, "BEAT_S", 0.05)
    asked = 0

    async def probe() -> None:
        nonlocal asked
        asked += 1
        if asked > 3:
            await asyncio.Event().wait()

    spec = setting.spec("program", "ready")
    group = setting.group("program", dataclasses.replace(spec, probe=probe))
    await group.start()
    lost = await group.lost()
    assert asked > 3 and "program hung" in lost.message


async def test_a_stop_during_the_start_ends_what_has_started(setting: Setting):
    running = setting.run([setting.group("a", setting.spec("a"))])
    await wait_for_line(setting, "start a")
    await setting.stop(running)
    assert setting.state.processes() == {} and not setting.ready.is_set()


async def test_a_child_that_ignores_sigterm_is_killed_with_what_it_started(setting: Setting):
    stubborn = setting.spec("stubborn", "fork", "stubborn", "ready", grace=0.2)
    running = setting.run([setting.group("stubborn", stubborn)])
    await setting.ready.wait()
    grandchild = next(int(line.split()[1]) for line in setting.lines() if line.startswith("child"))
    descriptor = os.pidfd_open(grandchild)
    await setting.stop(running)
    assert select.select([descriptor], [], [], 20)[0], "the grandchild still runs"
    os.close(descriptor)


def test_a_killed_supervisor_takes_redis_along(folder: Path):
    script = f"""
import asyncio
from services.launch.mesh import redis_spec
from services.launch.state import StateDir
from services.launch.supervisor import Group, Supervisor

async def main():
    state = StateDir({str(folder)!r})
    state.create()
    async def started():
        print(state.processes()["redis"], flush=True)
    await Supervisor([[Group("redis", [redis_spec(state)], state, 30)]]).run(asyncio.Event(), started)

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        descriptor = os.pidfd_open(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.communicate()
    assert select.select([descriptor], [], [], 20)[0], "redis-server still runs"
    os.close(descriptor)


def test_a_state_directory_belongs_to_one_mesh_at_a_time(folder: Path):
    script = f"""
import sys
from services.launch.state import StateDir
state = StateDir({str(folder)!r})
state.create()
state.lock()
print("held", flush=True)
sys.stdin.read()
"""
    holder = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    state = StateDir(folder)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        assert state.holder() == holder.pid
        assert folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(MeshError, match=rf"--state-dir {folder}: a mesh runs there already \(process {holder.pid}\)"):
            state.lock()
    finally:
        with contextlib.suppress(BrokenPipeError):
            holder.communicate(b"")
    assert state.holder() is None
    state.lock()


def test_a_state_directory_with_a_path_too_long_for_sockets_is_refused(tmp_path: Path):
    with pytest.raises(MeshError, match=r"--state-dir .*: is longer than .* bytes"):
        StateDir(tmp_path / ("x" * 100)).create()
