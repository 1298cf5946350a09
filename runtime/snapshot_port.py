"""What a runtime gives of the snapshots kept where it runs, and what it asks of the part that keeps them.

That part stands above the runtime and is handed to it when it is made; here are only the values that cross.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import Field

from runtime.samples import Frozen

if TYPE_CHECKING:
    from runtime.interface import Runtime
    from runtime.jobs import JobKind


class SnapshotRow(Frozen):
    """One snapshot of a list."""

    id: str
    commit: str
    kind: str
    """save, auto (made before a change), rollback, import."""
    label: str = ""
    note: str = ""
    annotation: str = ""
    """The git note added later."""
    tags: tuple[str, ...] = ()
    time_s: float
    """Unix time."""
    author: str = ""
    host: str | None = None
    hardware: str | None = None
    foreign: bool
    """Not made on the host of the store: its patches and units need trust there."""
    source: str | None = None
    """The commit that a rollback restores."""
    parents: tuple[str, ...] = ()
    model: str | None = None
    layout: str | None = None
    mode: str | None = None
    tree_budget: int | str | None = None
    temperature: float | str | None = None
    accept_length: float | None = None
    tok_s: float | None = None
    figure_source: str | None = None
    measured: str | None = None
    patched_files: int | str | None = None
    units: int | str | None = None


class SnapshotPage(Frozen):
    """Some rows of the history, newest first."""

    snapshots: tuple[SnapshotRow, ...]
    offset: int = 0
    more: bool = False
    """Whether older ones follow."""
    remote: str | None = None
    not_pushed: int | None = None
    """Commits the store's remote has not; None without a remote."""
    store: str = ""
    """Where the store is, in words."""
    host: str = ""
    """The host of the store."""
    hardware: str | None = None
    """The class of hardware of that host."""


class SnapshotView(Frozen):
    """One snapshot whole, without the contents of its patched files."""

    snapshot: SnapshotRow
    content: dict[str, Any] = Field(default_factory=dict)
    """Configuration, environment, measurements, packages, patches, units."""
    page: str = ""
    """Its README."""
    files: tuple[str, ...] = ()


class SnapshotComparison(Frozen):
    """What differs between two snapshots; a side that is absent or not known is "n/a"."""

    before: SnapshotRow
    after: SnapshotRow
    settings: tuple[dict[str, str], ...] = ()
    results: tuple[dict[str, Any], ...] = ()
    host: tuple[dict[str, str], ...] = ()
    patches: tuple[dict[str, str], ...] = ()
    units: tuple[dict[str, str], ...] = ()


class Snapshots(Protocol):
    """The snapshots kept on a runtime's host, to be read.

    Raises SnapshotUnknown where no snapshot or several have a name, RuntimeUnavailable where the store cannot be read.
    """

    async def page(self, words: str = "", offset: int = 0, limit: int = 50) -> SnapshotPage:
        """Snapshots newest first that hold all of `words`."""
        ...

    async def show(self, name: str) -> SnapshotView: ...

    async def diff(self, first: str, second: str = "latest") -> SnapshotComparison: ...


Keep = Callable[[str], Coroutine[Any, Any, str]]
"""Keeps what was taken down, beside the change that is named to it; one line on how that went, never an error."""


class Keeper(Protocol):
    """What keeps configurations for a runtime in this process."""

    @property
    def snapshots(self) -> Snapshots: ...

    @property
    def jobs(self) -> tuple[JobKind[Any], ...]:
        """Jobs that save a snapshot and roll back to one."""
        ...

    async def look(self, runtime: Runtime) -> Keep:
        """Takes down what runs at this moment, within a bounded time; raises nothing."""
        ...
