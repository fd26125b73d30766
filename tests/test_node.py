"""JavaScript clients against a running server, from the npm registry: slow, and skipped where it cannot be reached."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import XML_TEMPLATE, running, scripted
from test_clients import ANSWER, CITY, script

pytestmark = pytest.mark.slow

PACKAGES = ["openai@7", "ai@7", "@ai-sdk/openai-compatible@3"]
OPENAI = """
import OpenAI from "openai";
const client = new OpenAI({baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0});
const out = {};
const options = {model: "scripted", chat_template_kwargs: {enable_thinking: false}};
const hello = [{role: "user", content: "hello"}];
const stream = await client.chat.completions.create({...options, messages: hello, stream: true});
out.text = "";
for await (const chunk of stream) out.text += chunk.choices[0]?.delta?.content ?? "";
const parameters = {type: "object", properties: {city: {type: "string"}, days: {type: "integer"}}, required: ["city"]};
const tools = [{type: "function", function: {name: "get_weather", parameters}}];
const runner = client.chat.completions.stream({...options, messages: [{role: "user", content: "two calls"}], tools});
const final = await runner.finalChatCompletion();
out.calls = final.choices[0].message.tool_calls.map((c) => JSON.parse(c.function.arguments));
out.response = (await client.responses.create({model: "scripted", input: "hello"})).output_text;
try { await client.chat.completions.create({...options, messages: [{role: "user", content: "x"}], n: 2}); }
catch (error) { out.error = error.constructor.name + " " + error.param; }
console.log(JSON.stringify(out));
"""
AI = """
import {createOpenAICompatible} from "@ai-sdk/openai-compatible";
import {generateText, streamText, tool, jsonSchema, stepCountIs} from "ai";
const lisa = createOpenAICompatible({name: "lisa", baseURL: process.argv[2] + "/v1", includeUsage: true});
const model = lisa("scripted");
const out = {text: ""};
const streamed = streamText({model, prompt: "hello", maxRetries: 0});
for await (const piece of streamed.textStream) out.text += piece;
out.tokens = (await streamed.usage).outputTokens;
const parameters = {type: "object", properties: {city: {type: "string"}, days: {type: "integer"}}, required: ["city"]};
const cities = [];
const tools = {get_weather: tool({inputSchema: jsonSchema(parameters),
  execute: async ({city}) => { cities.push(city); return "sun"; }})};
const agent = await generateText({model, prompt: "the weather?", tools, stopWhen: stepCountIs(3), maxRetries: 0});
out.agent = agent.text;
out.cities = cities;
console.log(JSON.stringify(out));
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("no npm on this machine")
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text('{"type": "module"}')
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent", *PACKAGES]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("npm did not install the clients within two minutes")
    if done.returncode:
        pytest.skip(f"npm could not install the clients: {done.stderr.strip()[:200]}")
    return folder


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(scripted(tmp_path_factory.mktemp("model"), script, template=XML_TEMPLATE, right=3)) as address:
        yield address


def run(modules: Path, name: str, code: str, url: str) -> dict[str, object]:
    (modules / name).write_text(code)
    done = subprocess.run(["node", name, url], cwd=modules, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_openai_for_node(modules: Path, url: str) -> None:
    out = run(modules, "openai.js", OPENAI, url)
    assert out["text"] == out["response"] == ANSWER and out["error"] == "BadRequestError n"
    assert out["calls"] == [{"city": CITY, "days": 3}, {"city": "Rome"}]


def test_the_ai_sdk(modules: Path, url: str) -> None:
    out = run(modules, "ai.js", AI, url)
    assert out["text"] == out["agent"] == ANSWER and out["cities"] == [CITY] and out["tokens"]
