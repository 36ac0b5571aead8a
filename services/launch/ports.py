"""Free TCP ports on this machine."""

import random
import socket

from services.contracts.flags import refusal

FIRST, LAST = 20000, 32000  # below the range from which the kernel takes ports of outgoing connections


def free_ports(count: int, host: str = "127.0.0.1", spoken_for: int = 0) -> list[int]:
    """Different ports that nothing listens on now, without the one that is spoken for already. A child that still finds its
    port taken says so and is not started."""
    held: list[socket.socket] = []
    try:
        for port in random.sample(range(FIRST, LAST), LAST - FIRST):
            if len(held) == count:
                break
            if port != spoken_for and (bound := _bind(host, port)) is not None:
                held.append(bound)
        return [bound.getsockname()[1] for bound in held]
    finally:
        for bound in held:
            bound.close()


def require_free(host: str, port: int, field: str = "port") -> None:
    """ConfigError, naming the flag of `field`, if the address cannot be bound."""
    bound = _bind(host, port, reuse=True)
    if bound is None:
        raise refusal(field, port, f"{host}:{port} is in use, or is no address of this machine", "free it, or give another")
    bound.close()


def _bind(host: str, port: int, reuse: bool = False) -> socket.socket | None:
    """A socket bound there. `reuse` admits a port whose earlier connections still linger, as servers do."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if reuse:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        return None
    return bound
