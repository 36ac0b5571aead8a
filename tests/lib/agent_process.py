"""`python -m tests.lib.agent_process JSON`: an agent with limits that a test can wait for, and a mover that damages frames."""

import json
import sys
from typing import Any

from services.kvtransfer.agent import Agent, Place
from services.kvtransfer.session import Limits
from services.runtime.process import run
from tests.lib.transfer import DEADLINE_S

options = json.loads(sys.argv[1])


class Arguments:
    @classmethod
    def parse(cls, argv: list[str]) -> list[str]:
        return argv


async def main(process: Any, _: Any) -> None:
    place = Place(
        *(options[key] for key in ("engine_id", "role", "rank", "listen")),
        peer_listen="127.0.0.1:0",
        agent_socket=options["agent_socket"],
        startup_timeout=DEADLINE_S,
    )
    mover = ("tests.lib.mover_process", sys.argv[1])
    await Agent(place, lambda _: Limits(**options["limits"]), mover).run(process)


if __name__ == "__main__":
    run("agent", main, Arguments)
