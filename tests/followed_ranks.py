"""A plugin of pytest for `make coverage`: a rank, which its gang ends with SIGKILL, writes down first what it ran."""

from __future__ import annotations

from multiprocessing.process import BaseProcess

SAVING_S = 5.0
_kill = BaseProcess.kill


def _terminate_and_kill(process: BaseProcess) -> None:
    process.terminate()  # coverage saves at SIGTERM; a rank within a collective cannot hear it
    process.join(SAVING_S)
    _kill(process)


def pytest_configure() -> None:
    BaseProcess.kill = _terminate_and_kill  # type: ignore[method-assign]
