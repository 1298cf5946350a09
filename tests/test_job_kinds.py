"""A tune and a doctor of the runtime that serves, as jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from http_serving import OPERATOR, served
from test_jobs import PROMPTS, ended
from tiny_models import tiny_config

from runtime.doctor import CHECKS
from runtime.http_client import HttpRuntime
from runtime.interface import ConfigRejected
from runtime.local import LocalRuntime


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(tiny_folder: Path) -> AsyncIterator[LocalRuntime]:
    made = LocalRuntime(tiny_config(tiny_folder / "target", tiny_folder / "drafter", max_tree_budget=16))
    await made.wait_ready()
    yield made
    await made.aclose()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_tune_races_settings_and_applies_nothing(serving: LocalRuntime) -> None:
    before = (await serving.status()).config
    job = await ended(serving, "tune", {"prompts": PROMPTS, "tree_budgets": [4], "max_tokens": 4})
    assert job.state == "done" and job.result is not None, job.text
    assert job.text.startswith("fastest for latency: ") and "x plain" in job.text
    assert {"off", "chain", "tree"} == {each["mode"] for each in job.result["results"]}
    assert (await serving.status()).config == before
    assert {each.client for each in await serving.requests()} == {job.id}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_tune_that_cannot_be_served_is_refused_naming_the_field(serving: LocalRuntime) -> None:
    with pytest.raises(ConfigRejected, match="concurrency = 99"):
        await serving.start_job("tune", {"concurrency": 99})
    with pytest.raises(ConfigRejected, match="tree_budgets = 17"):
        await serving.start_job("tune", {"tree_budgets": [17]})
    with pytest.raises(ConfigRejected, match="objective"):
        await serving.start_job("tune", {"objective": "beauty"})


@pytest.mark.asyncio(loop_scope="module")
async def test_a_doctor_answers_beside_other_work(
    serving: LocalRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    job = await ended(serving, "doctor", {})
    assert job.state == "done" and job.result is not None, job.text
    assert len(job.result["checks"]) == len(CHECKS) and job.text.startswith(f"{len(CHECKS)} checks, ")
    async with served(serving) as url:
        attached = HttpRuntime(url, OPERATOR)
        there = await ended(attached, "doctor", {})
        await attached.aclose()
    assert there.result is not None and [each["id"] for each in there.result["checks"]] == [
        each["id"] for each in job.result["checks"]
    ]
    assert not torch.cuda.is_initialized(), "the driver is asked by a child process"
