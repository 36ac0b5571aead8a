"""The gateway process: HTTP in, tokens out. `python -m services.gateway.main --model DIR --prefill-address HOST:PORT`."""

import asyncio
import socket
from pathlib import Path

from k3mesh.client import Client
from services.contracts.arguments import GatewayArguments
from services.gateway.app import Gateway
from services.gateway.endpoint import Serving
from services.gateway.limits import Admission
from services.gateway.mesh import Mesh
from services.gateway.metrics import Metrics
from services.gateway.server import HttpServer, bind
from services.gateway.text.template import ChatTemplate
from services.gateway.text.tokenizer import Tokenizer
from services.runtime.ledger import Ledger
from services.runtime.process import Process, run
from services.runtime.telemetry import log


async def main(process: Process, arguments: GatewayArguments) -> None:
    """Serve until told to stop; the mesh may come, go and come back meanwhile."""
    listener = bind(arguments.host, arguments.port)
    port = listener.getsockname()[1]
    text = Path(arguments.tokenizer)
    tokenizer, template = Tokenizer.load(text), ChatTemplate.load(text)
    owner = f"gateway-{socket.gethostname()}-{port}"
    ledger = Ledger(arguments.redis_url, owner)
    await ledger.connect()
    admission = Admission(arguments.max_queued_requests)
    try:
        ledger.keep(lambda: {"role": "gateway", "requests": admission.in_flight})
        async with Client(arguments.prefill_address) as client:
            serving = Serving(
                model_name=arguments.served_model_name,
                mesh=Mesh(client, ledger),
                tokenizer=tokenizer,
                admission=admission,
                metrics=Metrics(),
                max_body_bytes=arguments.max_body_bytes,
                max_buffered_bytes=arguments.max_buffered_bytes,
                request_timeout=arguments.request_timeout,
            )
            log.info("listening", host=arguments.host, port=port, model=serving.model_name, tokenizer=tokenizer is not None)
            server = HttpServer(Gateway(serving, template, arguments.api_key), listener, on_started=process.ready)
            async with asyncio.TaskGroup() as group:
                group.create_task(server.run_until_stopped())
                await process.stopping.wait()
                await drain(admission, arguments.shutdown_timeout)
                server.stop()
    finally:
        await ledger.close()


async def drain(admission: Admission, timeout: float) -> None:
    """Refuse new requests, say so on /health, and let those in flight end; what is left after `timeout` is cut off."""
    admission.draining = True
    try:
        async with asyncio.timeout(timeout):
            await admission.idle()
    except TimeoutError:
        log.warning("shutting down with requests in flight", requests=admission.in_flight)


if __name__ == "__main__":
    run("gateway", main, GatewayArguments)
