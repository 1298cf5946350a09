"""See the package."""

from types import SimpleNamespace as SetInternalStateReq  # noqa: F401
