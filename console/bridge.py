"""The only console file that calls a Runtime: it turns answers and streams into messages for the app.

Everything here runs on the app's event loop. Widgets are never touched; a handler of the app does that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from textual.message import Message

from console import messages
from console.gather import Batch, gathered
from console.orders import Orders
from console.tree_feed import TreeFeed, Wanted
from console.words import ANSWER_S, describe_error, done_text, refused, status_problem
from runtime.interface import (
    ChangePlan,
    FieldChange,
    GenerateRequest,
    HostSample,
    JobProgress,
    LogLine,
    RequestAdmitted,
    RequestFinished,
    RequestStats,
    RoundStats,
    Runtime,
    RuntimeFault,
    Status,
    StatusChanged,
    TokenPiece,
    TokensEmitted,
)

RuntimeOpener = Callable[[], Awaitable[Runtime]]
Step = Callable[[Mapping[str, Any]], "dict[str, Any] | str"]
"""From the configuration in force to a change of it, or to the reason why there is none."""

STATUS_S = 1.0
LOADING_STATUS_S = 0.25
RETRY_S = 2.0
TOKENS_S = 0.2
ROUNDS_S = 0.5
HOST_S = 0.5
LOG_S = 0.2
TREES_S = 0.25
WATCH_S = 0.2


class Bridge:
    """One console's line to one runtime."""

    def __init__(
        self,
        source: Runtime | RuntimeOpener,
        post: Callable[[Message], object],
        author: str = "console",
    ) -> None:
        """`author`: who makes the changes of this console, as others are told."""
        self.author = author
        self._runtime = source if isinstance(source, Runtime) else None
        self._opener = None if isinstance(source, Runtime) else source
        self._post = post
        self._changing = asyncio.Lock()
        self._look = asyncio.Event()
        """Set: read the status now."""
        self._reshaped = asyncio.Event()
        """Set: a finished load or rebuild may have changed the description."""
        self._done: list[tuple[FieldChange, ...]] = []
        """Applied changes, the last one last; what undo reverts."""
        self._ended = True
        """Requests ended since they were last listed."""
        self.orders = Orders(lambda: self._runtime, post, describe_error, author)
        self._seen: Status | None = None
        """What the operator has before their eyes."""
        self._rounds: Batch[RoundStats] = Batch(ROUNDS_S, lambda r: post(messages.RoundsArrived(r)))
        self._samples: Batch[tuple[HostSample, float]] = Batch(HOST_S, self._tell_host)
        self._lines: Batch[LogLine] = Batch(LOG_S, lambda lines: post(messages.LinesArrived(lines)))

    @property
    def runtime(self) -> Runtime | None:
        """The runtime once it is open."""
        return self._runtime

    async def run(self) -> None:
        """Opens the runtime and watches it until cancelled."""
        while self._runtime is None:
            try:
                assert self._opener is not None
                self._runtime = await self._opener()
            except Exception as error:
                self._post(messages.BridgeProblem(f"the runtime did not start: {describe_error(error)}"))
                await asyncio.sleep(RETRY_S)
        self._post(messages.BridgeProblem(""))
        runtime = self._runtime
        await asyncio.gather(self._poll(runtime), self._describe(runtime), self._watch(runtime))

    async def close(self) -> None:
        """Ends the runtime, and with it every stream."""
        if self._runtime is not None:
            await self._runtime.aclose()

    async def _poll(self, runtime: Runtime) -> None:
        well, state = True, ""
        while True:
            pause = STATUS_S
            try:
                status = await asyncio.wait_for(runtime.status(), ANSWER_S)
            except Exception as error:
                well = False
                self._post(messages.BridgeProblem(status_problem(error)))
            else:
                if not well:
                    well = True
                    self._reshaped.set()  # what answers again may be another process
                    self._post(messages.BridgeProblem(""))
                self._show(status)
                await self._list(runtime, status)
                if status.state != state:
                    state = status.state
                    self._reshaped.set()
                if state == "loading":
                    pause = LOADING_STATUS_S
            self._look.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), pause)

    async def _list(self, runtime: Runtime, status: Status) -> None:
        """Lists the requests while there are any, and once more after the last one."""
        busy = status.running + status.waiting > 0
        if busy or self._ended:
            with contextlib.suppress(RuntimeFault, TimeoutError):
                self._ended = False
                self._post(messages.RequestsArrived(await asyncio.wait_for(runtime.requests(), ANSWER_S)))
            self._ended = self._ended or busy

    def _show(self, status: Status) -> None:
        """Shows a status unless one of a later change is known already: answers may overtake each other."""
        seen = self._seen
        if seen is not None and seen.started_at_s == status.started_at_s and status.revision < seen.revision:
            return
        self._seen = status
        self._post(messages.StatusArrived(status))

    async def _describe(self, runtime: Runtime) -> None:
        while True:
            try:
                self._post(messages.DescriptionArrived(await runtime.describe()))
                self._reshaped.clear()
                await self.orders.look_at_jobs()
                await self._reshaped.wait()
            except RuntimeFault:
                await asyncio.sleep(LOADING_STATUS_S)
            except Exception as error:
                self._post(messages.BridgeProblem(f"no description: {describe_error(error)}"))
                await asyncio.sleep(RETRY_S)

    async def _watch(self, runtime: Runtime) -> None:
        while True:
            try:
                async with contextlib.aclosing(gathered(runtime.watch(), WATCH_S)) as events:
                    async for event in events:
                        self._sort(event)
            except RuntimeFault:
                pass
            except Exception as error:
                self._post(messages.BridgeProblem(f"the event stream broke: {describe_error(error)}"))
            await asyncio.sleep(RETRY_S)

    def _sort(self, event: object) -> None:
        match event:
            case RoundStats():
                self._rounds.add(event)
            case HostSample():
                self._samples.add((event, time.monotonic()))
            case LogLine():
                self._lines.add(event)
            case RequestStats():
                self._ended = True
                self._post(messages.RequestArrived(event))
            case JobProgress():
                self._post(messages.JobChanged(event.job))
            case StatusChanged():
                self._post(messages.StateChanged(event))
                self._look.set()

    def _tell_host(self, samples: tuple[tuple[HostSample, float], ...]) -> None:
        self._post(messages.HostArrived(tuple(sample for sample, _ in samples), samples[-1][1]))

    async def answer(self, turn: int, request: GenerateRequest) -> None:
        """Streams one answer as messages marked with `turn`; to cancel the coroutine cancels the request."""
        if self._runtime is None:
            self._post(messages.AnswerFailed(turn, "the runtime has not started yet"))
            return
        answer = _Answer(turn, self._post)
        stream = self._runtime.generate(request)
        try:
            async for event in stream:
                answer.take(event)
        except Exception as error:
            answer.tokens.flush()
            self._post(messages.AnswerFailed(turn, describe_error(error)))
        finally:
            answer.tokens.flush()
            self._look.set()
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()

    async def trees(self, wanted: Callable[[], Wanted | None]) -> None:
        """Posts new rounds of the request that `wanted` names, while it names one, until cancelled."""
        feed = TreeFeed(self._post)
        while True:
            what = wanted()
            if self._runtime is not None and what is not None:
                await feed.look(self._runtime, what)
            await asyncio.sleep(TREES_S)

    async def cancel(self, request_id: str) -> bool:
        """Asks for the end of one request; False if it had ended already."""
        if self._runtime is None:
            return False
        try:
            return await self._runtime.cancel(request_id)
        except Exception as error:
            self._post(messages.BridgeProblem(f"cancel failed: {describe_error(error)}"))
            return False

    async def change(self, step: Step) -> None:
        """Applies a live change computed from what the operator sees; refused if that is not in force any more."""
        async with self._changing:
            await self._change(step, undo=False)

    async def preview(self, change: Mapping[str, Any]) -> ChangePlan | str:
        """What `change` would do, or in words why it cannot be done."""
        if self._runtime is None:
            return "the runtime has not started yet"
        try:
            plan = await self._runtime.preview(dict(change))
        except Exception as error:
            return describe_error(error)
        if not plan.allowed:
            return refused(plan)
        return plan if plan.changes else f"no change: {plan.summary}"

    async def apply(self, change: Mapping[str, Any], plan: ChangePlan, undo: bool = False) -> None:
        """Applies a collected change as it was planned; refused if the configuration changed since.

        `undo`: it reverts the last one. A rebuild takes its time, so other changes do not wait for it.
        """
        rebuilds = any(each.effect == "rebuild" for each in plan.changes)
        async with contextlib.nullcontext() if rebuilds else self._changing:
            undone = (
                self._done[-1] if undo and self._done else ()
            )  # a live change may come on top while it rebuilds
            answer = await self.orders.apply(change, plan)
            self._look.set()
            if isinstance(answer, str):
                self._post(messages.ChangeRefused(answer))
                return
            if not undo:
                self._done.append(answer.applied)
            elif undone in self._done:
                self._done.remove(undone)
            fields = tuple(each.field for each in answer.applied)
            config = {each.field: each.new for each in answer.applied}
            mode = {"mode": (self._seen.config if self._seen else {}).get("mode")}
            self._post(messages.ChangeDone(done_text(plan, answer, undo), fields, mode | config, undo))

    async def undo(self) -> dict[str, Any] | None:
        """Reverts the last applied change, unless its field was changed again since.

        One that rebuilt the engine is left as it is; the change that leads back is returned, to be planned and asked.
        """
        async with self._changing:
            if not self._done:
                self._post(messages.ChangeRefused("nothing to undo: no change was made from this console"))
                return None
            last = self._done[-1]

            def revert(config: Mapping[str, Any]) -> dict[str, Any] | str:
                for each in last:
                    if config.get(each.field) != each.new:
                        self._done.pop()
                        return (
                            f"not undone: {each.field} was changed again since, to {config.get(each.field)}"
                        )
                return {each.field: each.old for each in last}

            if all(each.effect == "live" for each in last):
                await self._change(revert, undo=True)
                return None
            assert self._runtime is not None
            try:
                back = revert((await self._runtime.status()).config)
            except Exception as error:
                back = describe_error(error)
            if isinstance(back, str):
                self._post(messages.ChangeRefused(back))
                return None
            return back

    async def _change(self, step: Step, undo: bool) -> None:
        runtime = self._runtime
        if runtime is None:
            self._post(messages.ChangeRefused("the runtime has not started yet"))
            return
        try:
            # An undo checks its own field, so it starts from what is in force.
            base = await runtime.status() if undo or self._seen is None else self._seen
            wanted = step(base.config)
            if isinstance(wanted, str):
                self._post(messages.ChangeRefused(wanted))
                return
            plan = await runtime.preview(wanted)
            refusal = refused(plan)
            if refusal:
                self._post(messages.ChangeRefused(refusal))
                return
            report = await runtime.apply(wanted, base.revision, self.author)
            status = await runtime.status()
        except Exception as error:
            self._look.set()
            self._post(messages.ChangeRefused(describe_error(error)))
            return
        if undo:
            self._done.pop()
        else:
            self._done.append(report.applied)
        self._show(status)
        fields = tuple(change.field for change in report.applied)
        self._post(messages.ChangeDone(done_text(plan, report, undo), fields, dict(status.config), undo))


class _Answer:
    """Books one answer's events: batches its tokens, counts its decode rounds, times them."""

    def __init__(self, turn: int, post: Callable[[Message], object]) -> None:
        self._turn = turn
        self._post = post
        self._rounds = -1
        self._first_s: float | None = None
        self._last_s = 0.0
        self.tokens: Batch[TokenPiece] = Batch(TOKENS_S, self._emit)

    def _emit(self, pieces: tuple[TokenPiece, ...]) -> None:
        spent = None if self._first_s is None else self._last_s - self._first_s
        self._post(messages.AnswerTokens(self._turn, pieces, max(self._rounds, 0), spent))

    def take(self, event: object) -> None:
        match event:
            case RequestAdmitted():
                self._post(
                    messages.AnswerAdmitted(
                        self._turn, event.request_id, event.prompt_tokens, event.cached_tokens, event.seed
                    )
                )
            case TokensEmitted():
                self._rounds += 1
                self._last_s = time.monotonic()
                self._first_s = self._first_s or self._last_s
                for piece in event.pieces:
                    self.tokens.add(piece)
            case RequestFinished():
                self.tokens.flush()
                self._post(messages.AnswerFinished(self._turn, event))
