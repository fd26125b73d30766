"""The server: who may ask and how much, what happens when things go wrong, and that the next request is answered."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from serving import CHAT, XML_TEMPLATE, running, scripted

from lisa.api import Model, Reply
from lisa.errors import UsageError
from lisa.server.anthropic import MessagesRequest, messages_ask
from lisa.server.app import _Completions, make_app
from lisa.server.completions import CompletionRequest, completion_prompts
from lisa.server.desk import Desk, Service, Settings
from lisa.server.guard import Limits, depth
from lisa.server.metrics import Metrics
from lisa.server.openai import ChatRequest, chat_ask
from lisa.server.problem import Problem
from lisa.server.run import bind, read_key
from lisa.server.turn import Nature
from lisa.types import Sampling

BODY: dict[str, Any] = {"model": "scripted", "messages": CHAT}
LONG = "abcdefghij" * 40
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": BODY,
    "/v1/completions": {"model": "scripted", "prompt": "hello>", "max_tokens": 500},
    "/v1/responses": {"model": "scripted", "input": "hello"},
    "/v1/messages": {"model": "scripted", "messages": CHAT, "max_tokens": 500},
}
WAIT = 60


class Gate:
    """A model's forwards wait here while it is shut; `reached` tells that one does."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()

    def __call__(self) -> None:
        if not self.open.is_set():
            self.reached.set()
            assert self.open.wait(WAIT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with running(scripted(folder, lambda c: "Hello!", context=512)) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=WAIT) as c:
        yield c


def answers(client: httpx.Client) -> None:
    """The server is alive: it says so, and it answers."""
    assert client.get("/health").json() == {"status": "ready"}
    got = client.post("/v1/chat/completions", json=BODY | {"max_tokens": 20})
    assert got.status_code == 200 and got.json()["choices"][0]["message"]["content"]


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    pause = threading.Event()
    for _ in range(WAIT * 100):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen")


# What is refused, and how


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n": 2}, "n"), ({"n": 0}, "n"), ({"n": -1}, "n"), ({"n": True}, "n"), ({"unknown": 1}, "unknown"),
        ({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"), ({"min_p": 2}, "min_p"), ({"seed": -1}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"99999": 1}}, "99999"), ({"stop": [""]}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"), ({"max_tokens": 0}, "max_tokens"), ({"stream_options": {}}, "stream"),
        ({"response_format": {"type": "xml"}}, "response_format.type"), ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"), ({"store": True}, "store"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "not"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"), ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "video"), ({"audio": {}}, "audio"),
        ({"chat_template_kwargs": {"colour": 1}}, "colour"), ({"modalities": ["audio"]}, "modalities"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template"), ({"model": None}, "model"),
        ({"adapter": "x"}, "adapter"), ({"reasoning_effort": "mad"}, "reasoning_effort"),
    ],
)  # fmt: skip
def test_E12_what_is_not_supported_is_refused_by_name(client: httpx.Client, change: Any, named: str) -> None:
    got = client.post("/v1/chat/completions", json=BODY | change)
    error = got.json()["error"]
    assert got.status_code == 400 and named in error["message"] and error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


def test_E12_null_is_absent_and_harmless_values_pass(client: httpx.Client) -> None:
    from lisa.server.anthropic import MessagesRequest
    from lisa.server.completions import CompletionRequest
    from lisa.server.openai import ChatRequest
    from lisa.server.responses import ResponsesRequest

    kinds = {
        "/v1/chat/completions": ChatRequest,
        "/v1/completions": CompletionRequest,
        "/v1/responses": ResponsesRequest,
        "/v1/messages": MessagesRequest,
    }
    for route, body in ROUTES.items():
        nulls = dict.fromkeys(name for name, f in kinds[route].model_fields.items() if not f.is_required())
        assert client.post(route, json=nulls | body).status_code == 200, route
    fine = {"n": 1, "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "seed": 3}
    assert client.post("/v1/chat/completions", json=BODY | fine).status_code == 200


@pytest.mark.parametrize("route", [*ROUTES, "/v1/messages/count_tokens"])
def test_E12_an_unknown_field_is_refused_by_name_on_every_route(client: httpx.Client, route: str) -> None:
    body = ROUTES.get(route) or {k: v for k, v in ROUTES["/v1/messages"].items() if k != "max_tokens"}
    assert client.post(route, json=body).status_code == 200
    got = client.post(route, json=body | {"unheard_of": 1})
    assert got.status_code == 400 and "unheard_of" in got.json()["error"]["message"]


def test_E12_logit_bias_is_honoured(folder: Path) -> None:
    model = scripted(folder, lambda c: "Hello!")
    with running(model) as address, httpx.Client(base_url=address, timeout=WAIT) as client:
        token = model.tokenizer.encode("Z")[0]
        bias = BODY | {"logit_bias": {str(token): 100}, "max_tokens": 3}
        assert client.post("/v1/chat/completions", json=bias).json()["choices"][0]["message"]["content"] == "ZZZ"


def test_every_sampling_option_reaches_the_sampler(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Sampling] = []
    chat = Model.chat

    def spy(self: Model, messages: Any, **options: Any) -> Any:
        seen.append(options["sampling"])
        return chat(self, messages, **options)

    monkeypatch.setattr(Model, "chat", spy)
    values = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "seed": 5,
    }  # fmt: skip
    assert httpx.post(f"{url}/v1/chat/completions", json=BODY | values, timeout=WAIT).status_code == 200
    assert seen == [Sampling(**values)]  # type: ignore[arg-type]


PARTS = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]


@pytest.mark.parametrize(
    ("messages", "same"),
    [
        ([{"role": "user", "content": PARTS}], CHAT),
        ([{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
        ([{"role": "user", "content": None}], [{"role": "user", "content": ""}]),
        ([{"role": "developer", "content": "a"}, *CHAT], [{"role": "system", "content": "a"}, *CHAT]),
    ],
)
def test_E10_content_in_any_form_renders_as_plain_text(client: httpx.Client, messages: Any, same: Any) -> None:
    one, other = (client.post("/v1/chat/completions", json=BODY | {"messages": m}) for m in (messages, same))
    assert one.status_code == other.status_code == 200
    assert one.json()["usage"]["prompt_tokens"] == other.json()["usage"]["prompt_tokens"]


def test_E10_null_content_beside_calls_and_parts_of_a_tools_result(client: httpx.Client) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}

    def prompt(content: Any, result: Any) -> int:
        messages = [
            *CHAT,
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": result},
        ]
        got = client.post("/v1/chat/completions", json=BODY | {"messages": messages})
        assert got.status_code == 200
        return int(got.json()["usage"]["prompt_tokens"])

    assert prompt(None, PARTS) == prompt("", "hello")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_E14_a_prompt_that_fills_the_context_is_refused_with_both_numbers(
    folder: Path, route: str, stream: bool
) -> None:
    model = scripted(folder, lambda c: LONG, context=40, right=10, wrong=5)
    with running(model) as address, httpx.Client(base_url=address, timeout=WAIT) as client:
        body = json.loads(json.dumps(ROUTES[route] | {"stream": stream}).replace("hello", "h" * 60))
        got = client.post(route, json=body)
        assert got.status_code == 400 and "40" in got.text and "shorten" in got.text
        if not route.endswith("messages"):
            assert got.json()["error"]["code"] == "context_length_exceeded"
        answers(client)


def test_E14_at_the_edge_of_the_context_an_answer_stops_with_length(folder: Path) -> None:
    model = scripted(folder, lambda c: LONG, context=16, right=10, wrong=5)
    with running(model) as address, httpx.Client(base_url=address, timeout=WAIT) as client:
        for size, status, delivered in ((14, 200, 1), (15, 400, 0), (10, 200, 5)):
            got = client.post("/v1/completions", json={"model": "scripted", "prompt": [3] * size + [29]})
            assert got.status_code == status
            if status == 200:
                choice = got.json()["choices"][0]
                assert choice["finish_reason"] == "length"
                assert got.json()["usage"]["completion_tokens"] == delivered


RUBBISH = {
    "not JSON": b"{",
    "an array": b"[]",
    "a number": b"1",
    "empty": b"",
    "not UTF-8": b'{"model": "\xff\xfe"}',
    "nested too deep": b'{"messages":' + b"[" * 100000 + b"]" * 100000 + b"}",
    "nested and open": b"[" * 5000,
    "half a surrogate": b'{"model": "scripted", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "a huge number": b'{"model": "scripted", "messages": [], "seed": ' + b"9" * 5000 + b"}",
    "NaN": b'{"model": "scripted", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
}


@pytest.mark.parametrize("route", [*ROUTES, "/v1/messages/count_tokens"])
@pytest.mark.parametrize("kind", RUBBISH)
def test_rubbish_is_a_client_error_and_the_next_request_is_answered(
    client: httpx.Client, route: str, kind: str
) -> None:
    got = client.post(route, content=RUBBISH[kind], headers={"content-type": "application/json"})
    assert 400 <= got.status_code < 500 and "error" in got.json()
    if route == "/v1/chat/completions":
        answers(client)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_that_a_web_form_could_send_is_refused(client: httpx.Client, content_type: str) -> None:
    got = client.post("/v1/chat/completions", content=json.dumps(BODY), headers={"content-type": content_type})
    assert got.status_code == 400


def test_other_paths_and_methods_are_refused_in_json(client: httpx.Client) -> None:
    for method, path, status in (("GET", "/x", 404), ("GET", "/v1/chat/completions", 405), ("DELETE", "/", 405)):
        got = client.request(method, path)
        assert got.status_code == status and got.json()["error"]["message"]


# Limits


def test_a_large_body_is_refused_with_and_without_its_length(folder: Path) -> None:
    with (
        running(scripted(folder, lambda c: "Hello!"), Settings(limits=Limits(body=2000))) as address,
        httpx.Client(base_url=address, timeout=WAIT) as client,
    ):
        big = BODY | {"messages": [{"role": "user", "content": "x" * 3000}]}
        assert client.post("/v1/chat/completions", json=big).status_code == 413
        pieces = (json.dumps(big)[i : i + 500].encode() for i in range(0, 4000, 500))
        got = client.post("/v1/chat/completions", content=pieces, headers={"content-type": "application/json"})
        assert got.status_code == 413 and got.json()["error"]["type"] == "request_too_large"
        answers(client)


def test_a_body_that_never_arrives_is_given_up(folder: Path) -> None:
    with running(scripted(folder, lambda c: "Hello!"), Settings(limits=Limits(patience=0.2))) as address:
        with send(address, "/v1/chat/completions", b'{"model"', length=500) as connection:
            assert b" 408 " in connection.recv(1000)
        with httpx.Client(base_url=address, timeout=WAIT) as client:
            answers(client)


def test_depth_counts_brackets_outside_strings() -> None:
    assert depth(b'{"a": [1, {"b": "[[[[\\"["}]}') == 3
    assert depth(b"[" * 100) == 100 and depth(b'"' + b"[" * 100) == 0


def test_more_requests_than_may_wait_are_turned_away(folder: Path) -> None:
    gate = Gate()
    model = scripted(folder, lambda c: "Hello!", slots=1, queue=1, gate=gate)
    with running(model) as address, httpx.Client(base_url=address, timeout=WAIT) as client:
        gate.open.clear()
        path = f"{address}/v1/chat/completions"
        threads = [threading.Thread(target=lambda: httpx.post(path, json=BODY, timeout=WAIT)) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: model.unfinished == 2)
        got = client.post("/v1/chat/completions", json=BODY)
        assert got.status_code == 503 and got.json()["error"]["code"] == "busy" and got.headers["retry-after"]
        gate.open.set()
        for thread in threads:
            thread.join(WAIT)
        answers(client)


def test_what_does_not_fit_into_memory_is_refused_before_it_is_read(folder: Path) -> None:
    reached: list[None] = []
    model = scripted(folder, lambda c: "Hello!", limit=1000 + 60 * 1000, gate=lambda: reached.append(None))
    with running(model) as address, httpx.Client(base_url=address, timeout=WAIT) as client:
        got = client.post("/v1/chat/completions", json=BODY | {"max_tokens": 100})
        assert got.status_code == 503 and got.json()["error"]["code"] == "memory_full"
        assert "may be resident" in got.text and not reached
        answers(client)


# Who may ask


KEY = "secret-key"


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[str]:
    settings = Settings(key=KEY, hosts=("lisa.example",), origins=("https://app.example",))
    with running(scripted(folder, lambda c: "Hello!"), settings) as address:
        yield address


@pytest.mark.parametrize("headers", [{"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}])
def test_E17_a_key_is_taken_in_either_header(guarded: str, headers: dict[str, str]) -> None:
    for route, body in ROUTES.items():
        assert httpx.post(guarded + route, json=body, headers=headers, timeout=WAIT).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}, {"authorization": KEY}, {"x-api-key": KEY + "x"},
     {"authorization": "Bearer é".encode()}],
)  # fmt: skip
def test_E17_without_the_key_there_is_401_in_json_with_cors(guarded: str, headers: dict[str, str]) -> None:
    for route, body in ROUTES.items():
        got = httpx.post(guarded + route, json=body, headers=headers | {"origin": "https://app.example"})
        assert got.status_code == 401 and got.json()["error"]["type"] == "authentication_error"
        assert got.headers["access-control-allow-origin"] == "https://app.example"
    assert httpx.get(f"{guarded}/metrics", headers=headers).status_code == 401
    assert httpx.get(f"{guarded}/health", headers=headers).status_code == 200


def test_E17_a_preflight_needs_no_key(guarded: str) -> None:
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
    got = httpx.options(f"{guarded}/v1/chat/completions", headers=headers)
    allowed = got.headers["access-control-allow-headers"].lower()
    assert got.is_success and "authorization" in allowed and "x-api-key" in allowed
    other = httpx.options(f"{guarded}/v1/chat/completions", headers=headers | {"origin": "https://evil.example"})
    assert other.status_code == 403 and "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "https://app.example.evil"])
def test_pages_of_other_origins_are_refused(guarded: str, origin: str) -> None:
    headers = {"origin": origin, "x-api-key": KEY}
    assert httpx.post(f"{guarded}/v1/chat/completions", json=BODY, headers=headers).status_code == 403
    assert httpx.get(f"{guarded}/v1/models", headers=headers).status_code == 403


def test_the_servers_own_pages_may_ask(guarded: str) -> None:
    headers = {"origin": guarded, "x-api-key": KEY}
    assert httpx.post(f"{guarded}/v1/chat/completions", json=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example", 403), ("localhost:80", 200), ("127.0.0.1", 200), ("[::1]:8", 200), ("lisa.example:1", 200),
     ("localhost.evil.example", 403), ("", 403), ("127.0.0.1.evil.example", 403), ("192.168.1.2:80", 200)],
)  # fmt: skip
def test_a_host_name_nobody_allowed_is_refused(guarded: str, host: str, status: int) -> None:
    got = httpx.get(f"{guarded}/v1/models", headers={"host": host, "x-api-key": KEY})
    assert got.status_code in (status, 400 if host == "" else status)


def test_a_taken_port_a_bad_host_and_an_open_door_fail_at_once() -> None:
    with bind("127.0.0.1", 0, None) as listening, pytest.raises(UsageError, match="cannot be listened on"):
        bind("127.0.0.1", listening.getsockname()[1], None)
    with pytest.raises(UsageError, match="no address of this machine"):
        bind("no.such.host.invalid", 0, None)
    with pytest.raises(UsageError, match="cannot be listened on"):
        bind("192.0.2.1", 0, "a-key-of-ten")
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(UsageError, match="api-key"):
            bind(host, 0, None)
    bind("0.0.0.0", 0, "a-key-of-ten").close()
    bind("localhost", 0, None).close()


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-the-file\n")
    assert read_key(str(file), "from-the-environment") == "from-the-file"
    assert read_key(None, "from-the-environment ") == "from-the-environment" and read_key(None, None) is None
    for wrong in ("", "short", "not ascii é", "two\nlines-of-it"):
        file.write_text(wrong)
        with pytest.raises(UsageError, match="8 printable"):
            read_key(str(file), None)
    with pytest.raises(UsageError, match="cannot be read"):
        read_key(str(tmp_path / "none"), None)


# Streams


class Clock:
    """Ticks when a test says so."""

    def __init__(self) -> None:
        self._wanted = threading.Semaphore(0)

    async def tick(self) -> None:
        while not self._wanted.acquire(blocking=False):
            await asyncio.sleep(0.005)

    def ring(self) -> None:
        self._wanted.release()


ALIVE = {
    "/v1/chat/completions": ": keep-alive",
    "/v1/completions": ": keep-alive",
    "/v1/responses": "event: keepalive",
    "/v1/messages": "event: ping",
}


@pytest.mark.parametrize("route", ROUTES)
def test_E18_a_stalled_prefill_shows_signs_of_life_at_the_clocks_rate(folder: Path, route: str) -> None:
    gate, clock = Gate(), Clock()
    gate.open.clear()
    model = scripted(folder, lambda c: "Hello!", gate=gate)
    with (
        running(model, Settings(tick=clock.tick)) as address,
        httpx.stream("POST", address + route, json=ROUTES[route] | {"stream": True}, timeout=WAIT) as got,
    ):
        lines = got.iter_lines()
        first = next(lines)
        assert first.startswith(("data: ", "event: ")), "something before the prompt is read"
        for _ in range(3):
            clock.ring()
            while not (line := next(lines)).startswith(ALIVE[route]):
                assert not line.startswith(("data: {\"error", "event: error"))  # fmt: skip
            if route.startswith("/v1/chat") or route.endswith("completions"):
                assert next(lines) == "", "never inside a frame"
        gate.open.set()
        rest = "\n".join(lines)
    assert "Hello!" in "".join(deltas(route, rest)) or rest


def deltas(route: str, text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.startswith("data: {"):
            yield json.dumps(json.loads(line[6:]), ensure_ascii=False)


@pytest.mark.parametrize("route", ROUTES)
def test_E18_a_late_error_is_an_event_and_then_the_stream_ends(folder: Path, route: str) -> None:
    count = iter(range(10**6))

    def fail() -> None:
        if next(count) == 3:
            raise ValueError("inner secret")

    model = scripted(folder, lambda c: LONG, gate=fail)
    with running(model) as address, httpx.Client(base_url=address, timeout=WAIT) as client:
        got = client.post(route, json=ROUTES[route] | {"stream": True})
        assert got.status_code == 200 and "error" in got.text and "secret" not in got.text
        events = [json.loads(line[6:]) for line in got.text.splitlines() if line.startswith("data: {")]
        assert "error" in events[-1] or events[-1].get("type") in ("error", "response.failed")
        count = iter(range(10, 10**6))
        answers(client)


def test_a_reply_that_takes_too_long_is_ended_with_an_error(folder: Path) -> None:
    gate = Gate()
    model = scripted(folder, lambda c: LONG, gate=gate)
    with running(model, Settings(timeout=0.1)) as address, httpx.Client(base_url=address, timeout=WAIT) as client:
        gate.open.clear()
        got = client.post("/v1/chat/completions", json=BODY)
        assert got.status_code == 504 and got.json()["error"]["code"] == "timeout"
        gate.open.set()
        until(lambda: model.unfinished == 0)


@pytest.mark.parametrize("route", [*ROUTES, "/v1/messages/count_tokens"])
def test_a_template_that_never_comes_back_loses_its_request_only(
    folder: Path, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = threading.Event()
    model = scripted(folder, lambda c: "Hello!")
    with (
        running(model, Settings(preparation=0.1)) as address,
        httpx.Client(base_url=address, timeout=WAIT) as client,
        monkeypatch.context() as patch,
    ):
        for name in ("chat", "generate", "prompt_tokens"):
            real = getattr(model, name)
            patch.setattr(model, name, lambda *a, real=real, **o: endless.wait(WAIT) and real(*a, **o))
        body = {k: v for k, v in ROUTES["/v1/messages"].items() if k != "max_tokens"}
        got = client.post(route, json=ROUTES.get(route, body))
        assert got.status_code == 504
        endless.set()
        until(lambda: model.unfinished == 0)


def send(address: str, path: str, body: bytes, length: int | None = None) -> socket.socket:
    """A request on a bare socket, which can be left in any way."""
    host = urlsplit(address).netloc
    connection = socket.create_connection(host.split(":"), timeout=WAIT)  # type: ignore[arg-type]
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("when", ["queued", "prefilling", "decoding", "sending the body"])
def test_a_client_that_goes_away_ends_its_work_and_frees_its_slot(folder: Path, stream: bool, when: str) -> None:
    gate = Gate()
    model = scripted(folder, lambda c: LONG, slots=1, gate=gate, chunk=4)
    with running(model) as address, httpx.Client(base_url=address, timeout=WAIT) as client:
        alone = client.post("/v1/chat/completions", json=BODY).json()["choices"][0]["message"]["content"]
        body = json.dumps(BODY | {"stream": stream}).encode()
        if when == "queued":
            gate.open.clear()
            first = send(address, "/v1/chat/completions", body)
            until(lambda: model.unfinished == 1)
            gate.reached.clear()
            with send(address, "/v1/chat/completions", body):
                until(lambda: model.unfinished == 2)
            gate.open.set()
            first.close()
        elif when == "sending the body":
            send(address, "/v1/chat/completions", body[:10], length=1000).close()
        else:
            if when == "prefilling":
                gate.open.clear()
            connection = send(address, "/v1/chat/completions", body)
            if when == "prefilling":
                assert gate.reached.wait(WAIT)
            else:
                until(lambda: model.unfinished == 1)
            connection.close()
            gate.open.set()
        until(lambda: model.unfinished == 0)
        again = client.post("/v1/chat/completions", json=BODY).json()["choices"][0]["message"]["content"]
        assert again == alone, "the prefix cache is sound"
        answers(client)


async def taken_at_once() -> None:
    pass


async def taken_in_a_turn() -> None:
    await asyncio.sleep(0)


async def never_taken() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("taking", [taken_at_once, taken_in_a_turn, never_taken])
def test_a_client_gone_before_its_stream_began_is_neither_decoded_for_nor_written_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch, route: str, taking: Callable[[], Any]
) -> None:
    gate = Gate()
    model = scripted(folder, lambda c: LONG, gate=gate)
    gate.open.clear()
    replies: list[Reply] = []
    for name in ("chat", "generate"):
        real = getattr(model, name)
        monkeypatch.setattr(model, name, lambda *a, real=real, **o: replies.append(real(*a, **o)) or replies[-1])
    arriving = [
        {"type": "http.request", "body": json.dumps(ROUTES[route] | {"stream": True}).encode(), "more_body": False}
    ]

    async def receive() -> Any:
        return arriving.pop(0) if arriving else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await taking()

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {
        "type": "http", "method": "POST", "path": route, "raw_path": route.encode(), "query_string": b"",
        "headers": headers, "root_path": "", "scheme": "http", "http_version": "1.1", "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80), "asgi": {"version": "3.0"},
    }  # fmt: skip
    try:
        # Nothing can have been read: the model has not got past its first forward when the request is over.
        asyncio.run(make_app(Service(model), Settings())(scope, receive, send))
        assert [reply._job.cancelled for reply in replies] == [True] and model.unfinished == 1
    finally:
        gate.open.set()
        model.close()


def test_a_later_prompt_of_a_completion_is_ended_like_the_first(folder: Path) -> None:
    model, replies = scripted(folder, lambda c: "Hello!"), []
    real = model.generate
    model.generate = lambda *a, **o: replies.append(real(*a, **o)) or replies[-1]  # type: ignore[method-assign]
    body = CompletionRequest(model="scripted", prompt=["a>", "b>"], stream=True, echo=True)
    runs = _Completions(Desk(Service(model), Settings(), Metrics(lambda: 0.0)), model, body, completion_prompts(body))

    async def leave_at_the_second() -> None:
        stream = runs.stream(await runs.begin(0))
        while len(replies) < 2:
            await stream.__anext__()
        await stream.aclose()  # type: ignore[attr-defined]
        assert [reply._job.cancelled for reply in replies] == [True, True]

    asyncio.run(leave_at_the_second())
    model.close()


def test_a_reader_that_stops_reading_is_ended_and_others_go_on(folder: Path) -> None:
    model = scripted(folder, lambda c: "abcdefghij" * 3000, slots=2, backlog=50)
    with running(model, Settings(patience=0.5)) as address, httpx.Client(base_url=address, timeout=WAIT) as client:
        body = BODY | {"stream": True, "logprobs": True, "top_logprobs": 20}
        connection = send(address, "/v1/chat/completions", json.dumps(body).encode())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        until(lambda: model.unfinished == 1)
        until(lambda: model.unfinished == 0)
        answers(client)
        connection.close()


def test_E15_requests_that_join_and_leave_get_what_they_get_alone(folder: Path) -> None:
    def script(conversation: str) -> str:
        name = conversation.rsplit("user\n", 1)[-1][:6]
        return f"{name} says: " + " and".join(f"{i}{name}" for i in range(len(name) + sum(name.encode()) % 3))

    model = scripted(folder, script, slots=8, right=3, wrong=2)
    with running(model) as address, httpx.Client(base_url=address, timeout=WAIT) as client:

        def ask(i: int, **more: Any) -> str:
            chat = [{"role": "user", "content": f"name{i % 5}{i} " + "x" * (i * 7)}]
            body = BODY | {"messages": chat, "max_tokens": 20 + 5 * i, "temperature": 1.0, "seed": i} | more
            got = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=WAIT)
            assert got.status_code == 200
            return str(got.json()["choices"][0]["message"]["content"])

        alone = [ask(i) for i in range(8)]
        assert len(set(alone)) == 8
        together: dict[int, list[str]] = {}
        threads = [
            threading.Thread(target=lambda i=i: together.update({i: [ask(i) for _ in range(1 + i % 3)]}))
            for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert together == {i: [alone[i]] * (1 + i % 3) for i in range(8)}
        answers(client)


def test_a_long_prompt_is_read_between_the_rounds_of_others(folder: Path) -> None:
    order: list[str] = []
    model = scripted(folder, lambda c: LONG, slots=2, chunk=16)
    forward = model._loaded.engine.target.forward  # type: ignore[union-attr]

    def spy(tokens: Any, state: Any, *rest: Any, **named: Any) -> Any:
        order.append("chunk" if tokens.shape[0] > 1 else "round")
        return forward(tokens, state, *rest, **named)

    model._loaded.engine.target.forward = spy  # type: ignore[method-assign,union-attr]
    with model:
        short = iter(model.chat(CHAT, max_tokens=200))
        for _ in range(6):
            next(short)
        order.clear()
        long = model.chat([{"role": "user", "content": "x" * 400}], max_tokens=1)
        list(long)
        list(short)
        first, last = order.index("chunk"), len(order) - order[::-1].index("chunk")
        between = order[first:last]
        assert between.count("chunk") > 20 and between.count("round") >= between.count("chunk") - 2


# Life and death


def test_health_follows_the_engine(folder: Path) -> None:
    service = Service()
    with running(None, service=service) as address, httpx.Client(base_url=address, timeout=WAIT) as client:
        assert (client.get("/health").status_code, client.get("/health").json()) == (503, {"status": "loading"})
        assert client.post("/v1/chat/completions", json=BODY).status_code == 503
        assert client.get("/v1/models").status_code == 503
        service.model = scripted(folder, lambda c: "Hello!")
        answers(client)
        service.model.close()
        assert (client.get("/health").status_code, client.get("/health").json()) == (503, {"status": "failed"})
        assert client.post("/v1/chat/completions", json=BODY).status_code == 503


def test_closing_ends_streams_with_a_word(folder: Path) -> None:
    gate = Gate()
    model = scripted(folder, lambda c: LONG, gate=gate)
    with (
        running(model) as address,
        httpx.stream("POST", f"{address}/v1/chat/completions", json=BODY | {"stream": True}, timeout=WAIT) as got,
    ):
        lines = got.iter_lines()
        next(lines)
        gate.open.clear()
        closing = threading.Thread(target=model.close)
        closing.start()
        gate.open.set()
        rest = "\n".join(lines)
        closing.join(WAIT)
        assert "shutting_down" in rest or '"finish_reason":"stop"' in rest or "cancelled" not in rest


def test_metrics_add_up(folder: Path) -> None:
    model = scripted(folder, lambda c: "Hello there!", right=2, wrong=1)
    with running(model) as address, httpx.Client(base_url=address, timeout=WAIT) as client:
        usage = [client.post("/v1/chat/completions", json=BODY).json() for _ in range(2)]
        client.post("/v1/chat/completions", json=BODY | {"n": 2})
        text = client.get("/metrics").text

    def value(name: str) -> float:
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    assert value("lisa_completion_tokens_total") == sum(u["usage"]["completion_tokens"] for u in usage)
    assert value("lisa_prompt_tokens_total") == sum(u["usage"]["prompt_tokens"] for u in usage)
    cached = [u["usage"]["prompt_tokens_details"]["cached_tokens"] for u in usage]
    assert value("lisa_cached_tokens_total") == sum(cached) > 0 and value("lisa_prefix_hits_total") == 1
    assert value("lisa_accepted_total") == sum(u["timings"]["accepted"] for u in usage) > 0
    assert value("lisa_proposed_total") == sum(u["timings"]["drafted"] for u in usage)
    assert value('lisa_requests_total{route="/v1/chat/completions",status="200"}') == 2
    assert value('lisa_requests_total{route="/v1/chat/completions",status="400"}') == 1
    assert value("lisa_first_token_seconds_count") == 2 and value("lisa_memory_bytes") >= 1000


def test_the_document_describes_every_route(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    posts = {path for path, routes in document["paths"].items() if "post" in routes}
    assert posts == {*ROUTES, "/v1/messages/count_tokens"}
    for path in posts:
        operation = document["paths"][path]["post"]
        assert operation["requestBody"]["required"] and {"200", "400", "401", "503"} <= set(operation["responses"])


def test_nothing_is_fetched_and_no_path_is_opened_for_a_client(client: httpx.Client) -> None:
    for name in ("../../etc/passwd", "/etc/passwd", "owner/name", "https://example.org/x"):
        got = client.post("/v1/chat/completions", json=BODY | {"model": name})
        assert got.status_code == 404
        assert client.get(f"/v1/models/{name.lstrip('/')}").status_code == 404
    assert http.client.HTTPConnection is not None


def test_the_template_of_a_thinking_model_decides_what_thinking_options_do(folder: Path) -> None:
    def script(conversation: str) -> str:
        return ("hm\n</think>\n\n" if conversation.endswith("<think>\n") else "") + "Hello!"

    model = scripted(folder, script, template=XML_TEMPLATE)
    with running(model) as address, httpx.Client(base_url=address, timeout=WAIT) as client:

        def message(**more: Any) -> dict[str, Any]:
            got = client.post("/v1/chat/completions", json=BODY | more)
            assert got.status_code == 200, got.text
            return dict(got.json()["choices"][0]["message"])

        assert message()["reasoning_content"] == "hm\n"
        assert "reasoning_content" not in message(reasoning_effort="none")
        assert "reasoning_content" not in message(chat_template_kwargs={"enable_thinking": False})
        assert message(reasoning_effort="low")["reasoning_content"] == "hm\n"
        assert message(thinking_budget=1)["reasoning_content"].strip() == "h"


THINKER = Nature(True, lambda name: name == "enable_thinking")


def asked(nature: Nature, body: Mapping[str, Any]) -> Mapping[str, Any] | int:
    """The options a request reaches Model.chat with, or the status it is refused with."""
    try:
        if "max_tokens" in body:
            return messages_ask(MessagesRequest.model_validate(body), nature).options
        return chat_ask(ChatRequest.model_validate(body), nature).options
    except Problem as error:
        return error.status


@pytest.mark.parametrize("effort", [None, "none", "minimal", "low", "medium", "high", "xhigh"])
@pytest.mark.parametrize("enable", [None, True, False])
@pytest.mark.parametrize("budget", [None, 0, 5, 5000])
def test_what_a_chat_says_of_thinking_outright_is_done_and_what_contradicts_is_refused(
    effort: str | None, enable: bool | None, budget: int | None
) -> None:
    more = {"reasoning_effort": effort, "thinking_budget": budget}
    got = asked(THINKER, BODY | more | {"chat_template_kwargs": {"enable_thinking": enable}})
    wanted = [on for on in (enable, None if effort is None else effort != "none") if on is not None]
    if len(set(wanted)) == 2:
        assert got == 400
        return
    assert isinstance(got, Mapping) and got.get("thinking") == (wanted[0] if wanted else None)
    of_effort = {"minimal": 256, "low": 1024, "medium": 8192}.get(effort or "")
    assert got.get("thinking_budget") == (of_effort if budget is None else budget)


@pytest.mark.parametrize("effort", ["low", "medium", "high", "xhigh", "max"])
@pytest.mark.parametrize("thinks", [True, False])
def test_an_effort_of_messages_means_something_only_where_thinking_is_on(effort: str, thinks: bool) -> None:
    nature = Nature(thinks, THINKER.reads)
    body = ROUTES["/v1/messages"]
    with_effort = body | {"output_config": {"effort": effort}}
    for off in ({}, {"thinking": {"type": "disabled"}}):
        assert asked(nature, with_effort | off) == asked(nature, body | off) != 400
    on = asked(nature, with_effort | {"thinking": {"type": "enabled", "budget_tokens": 77}})
    adaptive = asked(nature, with_effort | {"thinking": {"type": "adaptive"}})
    if not thinks:
        assert on == adaptive == 400
        return
    assert isinstance(on, Mapping) and isinstance(adaptive, Mapping)
    assert on["thinking"] is adaptive["thinking"] is True and on["thinking_budget"] == 77
    assert adaptive.get("thinking_budget") == {"low": 1024, "medium": 8192}.get(effort)


MALFORMED: list[Any] = [
    {"required": True}, {"required": "a"}, {"required": [5, {}]}, {"properties": 5}, {"properties": [1]},
    {"$defs": 5, "properties": {"a": {"$ref": "#/$defs/A"}}}, {"definitions": [], "properties": {"a": True}},
    {"$defs": {"A": {"$ref": "#/$defs/A"}}, "properties": {"a": {"$ref": "#/$defs/A"}}}, {"type": 5},
    *({"properties": {"a": schema}, "required": ["a"]} for schema in (
        5, None, "x", [], {"type": 5}, {"type": [5, None]}, {"type": []}, {"type": "zzz"}, {"enum": 5}, {"enum": []},
        {"enum": [[], {}]}, {"anyOf": 5}, {"oneOf": {"a": 1}}, {"anyOf": [5, None]}, {"anyOf": "x"}, {"$ref": 5},
        {"$ref": "#/$defs/none"}, {"$ref": "#/"}, {"type": "array", "items": {"$ref": "#/$defs/none"}},
        {"type": "integer", "minimum": "x"}, {"type": "object", "required": True}, {"type": "object", "properties": 5},
    )),
]  # fmt: skip


@pytest.mark.parametrize("xml", [True, False])
def test_no_schema_of_a_tool_is_a_bug_of_the_servers(folder: Path, xml: bool) -> None:
    template = XML_TEMPLATE if xml else "{{ tools }}{% for m in messages %}{{ m.role }}\n{{ m.content }}{% endfor %}"
    model = scripted(folder, lambda c: "Hello!", template=template)
    assert model.calls == ("xml" if xml else "json")
    with running(model) as address, httpx.Client(base_url=address, timeout=WAIT) as client:
        for parameters in MALFORMED:
            for more in ({}, {"tool_choice": "required"}):
                function = {"name": "f", "parameters": parameters, "strict": bool(more)}
                body = BODY | more | {"tools": [{"type": "function", "function": function}], "max_tokens": 2}
                got = client.post("/v1/chat/completions", json=body)
                assert got.status_code in (200, 400), (parameters, more, got.text)
                assert got.status_code == 200 or more, "free to be wrong where nothing is enforced"
