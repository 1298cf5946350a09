"""What the bridge does for the Tree screen: it looks for rounds decoded since the last look, while somebody watches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from textual.message import Message

from runtime.interface import RequestStats, Runtime, RuntimeFault, TreeTrace


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which request's trees are watched; None: the newest one."""

    request_id: str | None = None


class TreesArrived(Message):
    """Requests there are, and rounds of one of them."""

    def __init__(
        self,
        requests: tuple[RequestStats, ...],
        request_id: str | None,
        traces: tuple[TreeTrace, ...],
        anew: bool,
    ) -> None:
        """`traces`: rounds since the last message, or with `anew` all that are kept. `request_id` None: no request."""
        super().__init__()
        self.requests = requests
        self.request_id = request_id
        self.traces = traces
        self.anew = anew


class TreeFeed:
    """One watcher's place in the rounds of a request."""

    def __init__(self, post: Callable[[Message], object]) -> None:
        self._post = post
        self._request_id: str | None = None
        self._last = 0
        """Index of the newest round that was posted."""
        self._requests: tuple[RequestStats, ...] | None = None

    async def look(self, runtime: Runtime, wanted: Wanted) -> None:
        """Posts what is new; a runtime that does not answer just now has nothing new."""
        try:
            requests = await runtime.requests()
            request_id = wanted.request_id or newest(requests)
            if request_id != self._request_id:
                self._request_id, self._last, self._requests = request_id, 0, None
            traces, anew = await self._rounds(runtime, request_id)
        except (RuntimeFault, TimeoutError):
            return
        if traces or anew or requests != self._requests:
            self._requests = requests
            self._post(TreesArrived(requests, request_id, traces, anew))

    async def _rounds(self, runtime: Runtime, request_id: str | None) -> tuple[tuple[TreeTrace, ...], bool]:
        if request_id is None:
            return (), self._requests is None
        known, first = self._last, self._last == 0
        traces = await runtime.trace(request_id, max(known - 1, 0))
        if known and not any(trace.round_index == known for trace in traces):
            # Too many rounds ago to be kept, or another engine counts from 1 again.
            traces, first = await runtime.trace(request_id), True
        else:
            traces = tuple(trace for trace in traces if trace.round_index > known)
        self._last = traces[-1].round_index if traces else 0 if first else known
        return traces, first and (bool(traces) or self._requests is None)


def newest(requests: tuple[RequestStats, ...]) -> str | None:
    """The request that began last among those that decode, else the one that ended last."""
    decoding = [each for each in requests if each.state == "decoding"]
    if decoding:
        return decoding[-1].request_id
    ended = [each for each in requests if each.state == "finished"]
    if ended:
        return ended[0].request_id
    return requests[0].request_id if requests else None
