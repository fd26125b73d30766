"""Requests made up from the server's own OpenAPI document: none is answered with a bug, and the engine lives on."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from serving import CHAT, running, scripted

from lisa.api import Model

schemathesis = pytest.importorskip("schemathesis")

ROUTES = [
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/responses"), ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"), ("GET", "/v1/models/{name}"), ("GET", "/v1/models"), ("GET", "/health"),
    ("GET", "/metrics"), ("GET", "/"),
]  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Model]]:
    model = scripted(tmp_path_factory.mktemp("model"), lambda c: "Hi!", slots=2, context=512)
    with running(model) as address:
        yield address, model


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_request_is_answered_with_a_bug(served: tuple[str, Model], method: str, path: str) -> None:
    address, model = served
    document = httpx.get(f"{address}/openapi.json").json()
    operation = schemathesis.openapi.from_dict(document)[path][method]

    @settings(max_examples=15, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def fuzz(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "scripted"  # else every request ends at the name
        response = case.call(base_url=address, timeout=60)
        assert response.status_code < 500, response.text

    fuzz()
    assert model.alive and model.unfinished == 0
    got = httpx.post(f"{address}/v1/chat/completions", json={"model": "scripted", "messages": CHAT}, timeout=60)
    assert got.json()["choices"][0]["message"]["content"] == "Hi!"
