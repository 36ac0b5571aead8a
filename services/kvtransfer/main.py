"""The transfer agent beside one worker: `python -m services.kvtransfer.main --rank N --listen HOST:PORT …`."""

from services.contracts.arguments import AgentArguments
from services.kvtransfer.agent import Agent, Place
from services.kvtransfer.session import Limits
from services.kvtransfer.transport import Profile
from services.runtime.process import Process, run


async def main(process: Process, arguments: AgentArguments) -> None:
    place = Place(
        engine_id=arguments.engine_id,
        role=arguments.disaggregation_mode,
        rank=arguments.rank,
        listen=arguments.listen,
        peer_listen=arguments.peer_listen or f"{arguments.listen.rpartition(':')[0]}:0",
        agent_socket=arguments.agent_socket,
        startup_timeout=arguments.startup_timeout,
    )

    def limits(profile: Profile) -> Limits:
        return Limits(
            frame_bytes=arguments.transfer_frame_bytes or profile.frame_bytes,
            frames=arguments.transfer_frames or profile.frames,
            window=profile.window,
            piece_bytes=profile.piece_bytes,
        )

    await Agent(place, limits).run(process)


if __name__ == "__main__":
    run("agent", main, AgentArguments)
