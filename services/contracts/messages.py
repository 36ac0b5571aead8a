"""The plain messages that services agree on. Their protobuf forms are in services/runtime/wire.py."""

from dataclasses import dataclass

from k3mesh.errors import MeshError, from_code
from services.contracts.ids import Token


@dataclass(frozen=True, slots=True)
class Failure:
    """A typed error as data: `code` is one of k3mesh.errors, `detail` narrows it down, such as a PD_* code."""

    code: str
    message: str
    detail: str = ""

    @classmethod
    def of(cls, error: MeshError) -> "Failure":
        return cls(error.code, error.message, error.detail)

    def error(self) -> MeshError:
        return from_code(self.code, self.message, self.detail)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next tokens are chosen and when to stop; the schedulers pass it on to the workers as it came."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_tokens: int = 1
    ignore_eos: bool = False
    stop_token_ids: tuple[Token, ...] = ()
