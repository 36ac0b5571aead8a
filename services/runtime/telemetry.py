"""Structured logs: one JSON line an event on stderr, with the ids that are bound in the current context."""

import logging
import sys
from typing import Any

import orjson
import structlog

log: Any = structlog.get_logger()


def configure_logging(service: str, level: str = "info") -> None:
    """Log as `service` from `level` on. Prompt and output text never belong in a log."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=lambda event, **_: orjson.dumps(event, default=str).decode()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
