"""What the operator orders beyond single keys, as the bridge carries it out: plans, collected changes, jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from textual.message import Message

from console import messages
from runtime.interface import ChangePlan, ChangeReport, ConfigRejected, Runtime, RuntimeFault

NOT_STARTED = "the runtime has not started yet"


class Orders:
    """Orders to the runtime that `runtime` gives once it is there; answers come as messages."""

    def __init__(
        self,
        runtime: Callable[[], Runtime | None],
        post: Callable[[Message], object],
        explain: Callable[[BaseException], str],
        author: str,
    ) -> None:
        self._runtime = runtime
        self._post = post
        self._explain = explain
        self._author = author

    async def plan(self, change: Mapping[str, Any]) -> None:
        """Asks what `change` would do."""
        runtime = self._runtime()
        if runtime is None:
            self._post(messages.PlanArrived(dict(change), None, NOT_STARTED))
            return
        try:
            plan = await runtime.preview(dict(change))
        except Exception as error:
            self._post(messages.PlanArrived(dict(change), None, self._explain(error)))
        else:
            self._post(messages.PlanArrived(dict(change), plan, ""))

    async def apply(self, change: Mapping[str, Any], plan: ChangePlan) -> ChangeReport | str:
        """Applies what was planned, if nothing changed since; the report, or why not."""
        runtime = self._runtime()
        if runtime is None:
            return NOT_STARTED
        try:
            report = await runtime.apply(dict(change), plan.revision, self._author)
        except Exception as error:
            return self._explain(error)
        return report if report.applied else report.summary

    async def start_job(self, kind: str, parameters: Mapping[str, Any]) -> None:
        runtime = self._runtime()
        try:
            if runtime is None:
                raise RuntimeFault(NOT_STARTED)
            await runtime.start_job(kind, dict(parameters), self._author)
        except Exception as error:
            field = error.field if isinstance(error, ConfigRejected) else None
            self._post(messages.JobNotStarted(kind, self._explain(error), field))
        await self.look_at_jobs()

    async def cancel_job(self, job_id: str) -> None:
        runtime = self._runtime()
        try:
            if runtime is not None and not await runtime.cancel_job(job_id):
                self._post(messages.JobNotStarted("cancel", f"{job_id} has ended already", None))
        except Exception as error:
            self._post(messages.JobNotStarted("cancel", self._explain(error), None))

    async def look_at_jobs(self) -> None:
        """Tells of all jobs there are: those that began before this console did, and ends that were missed."""
        runtime = self._runtime()
        if runtime is None:
            return
        try:
            jobs = await runtime.jobs()
        except (TimeoutError, RuntimeFault, OSError):
            return
        for job in reversed(jobs):
            self._post(messages.JobChanged(job))
