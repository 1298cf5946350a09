"""How the HTTP server is set up; none of it is a setting of the runtime behind it."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_PORT = 8642


@dataclass(frozen=True)
class ServerSettings:
    """Address, limits and origins of one HTTP server."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0: any free port."""
    cors_origins: tuple[str, ...] = ()
    """Web origins whose pages may call this server; none by default."""
    max_body_bytes: int = 2 * 1024 * 1024
    request_timeout_s: float | None = 3600.0
    """Longest time of one inference request, waiting included; None = no limit."""
    keep_alive_s: float = 10.0
    """A stream that has nothing to say sends a comment this often."""
