"""Requests made up from the OpenAPI document: none of them may be answered by a fault of the server."""

from __future__ import annotations

import pytest
import schemathesis
from api_server import ApiServer
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode

EXAMPLES = 20


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
def test_no_request_is_answered_by_a_fault_of_the_server(tiny_api: ApiServer, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{tiny_api.url}/openapi.json").exclude(
        path_regex="^/(runtime|snapshots)"
    )
    asked = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Case) -> None:
            response = case.call(timeout=60)
            asked.add(case.operation.label)
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}

        ask()
    assert "POST /v1/chat/completions" in asked and "POST /v1/completions" in asked
