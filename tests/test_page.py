"""The page at /: one file without anything from elsewhere, and a real browser that talks through it."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import XML_TEMPLATE, running, scripted

from lisa.server.desk import Settings

PAGE = Path(__file__).parent.parent / "lisa" / "server" / "web" / "index.html"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ANSWER = "Hello <b>world</b>, é \U0001f680 and the rest"


class Names(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("src", "href"):
                self.links.append(str(value))


def test_the_page_needs_nothing_from_elsewhere_and_names_what_it_has() -> None:
    text = PAGE.read_text("utf-8")
    names = Names()
    names.feed(text)
    assert names.links == ["data:,"] and not re.search(r"https?://|@import|url\(", text)
    assert len(set(names.ids)) == len(names.ids)
    assert set(re.findall(r'\$\("([\w-]+)"\)', text)) <= set(names.ids)
    assert "innerHTML" not in text, "what a model says is never markup"


def test_the_page_is_served_with_a_policy_that_forbids_the_rest(tmp_path: Path) -> None:
    with running(scripted(tmp_path, lambda c: "x"), Settings(key="a-secret-key")) as address:
        got = httpx.get(address)
        assert got.status_code == 200 and got.text == PAGE.read_text("utf-8")
        assert "default-src 'none'" in got.headers["content-security-policy"]


class Hold:
    """Once `left` is set, a model runs that many forwards more and then waits to be let go."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.go = threading.Event()

    def __call__(self) -> None:
        if self.left is not None:
            self.left -= 1
            assert self.left > 0 or self.go.wait(60)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("no Chromium on this machine")
    with api.sync_playwright() as playwright:
        # The sandbox refuses to run as root, as many test machines do.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=BROWSER, args=arguments)
        yield chromium
        chromium.close()


def script(conversation: str) -> str:
    last = conversation.rsplit("user\n", 1)[-1]
    said = "abcdefghij " * 400 if "long" in last else ANSWER
    return ("I think.\n</think>\n\n" if conversation.endswith("<think>\n") else "") + said


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_sends_streams_stops_and_sees_what_was_drafted(browser: Any, tmp_path: Path, scheme: str) -> None:
    from playwright.sync_api import expect

    hold = Hold()
    model = scripted(tmp_path / "model", script, template=XML_TEMPLATE, right=3, wrong=1, gate=hold)
    shots = Path(os.environ.get("LISA_SCREENSHOTS") or tmp_path)
    with running(model) as address:
        page = browser.new_page(color_scheme=scheme, viewport={"width": 900, "height": 760})
        trouble: list[str] = []
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("console", lambda line: trouble.append(line.text) if line.type == "error" else None)
        page.on("request", lambda r: None if r.url.startswith((address, "data:")) else trouble.append(r.url))
        page.goto(address)
        expect(page.locator("#about")).to_contain_text("scripted")
        page.keyboard.type("hello")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("there")
        page.keyboard.press("Enter")
        page.wait_for_selector("article.assistant .cost")
        assert page.locator("article.user .text").inner_text() == "hello\nthere"
        assert page.locator("article.assistant > .text").inner_text() == ANSWER
        assert not page.locator("article.assistant details").evaluate("d => d.open"), "thinking is folded"
        assert page.locator("article.assistant details .text").text_content() == "I think.\n"
        drafted = page.locator("article.assistant > .text .drafted").all_text_contents()
        assert drafted and len("".join(drafted)) < len(ANSWER)
        live = page.locator("#live").inner_text()
        assert "tok/s" in live and "accepted per round" in live and "drafter" in live
        page.screenshot(path=str(shots / f"page-{scheme}.png"))
        page.locator("#open").click()
        page.locator("#system").fill("Be brief.")
        page.locator("#temperature").fill("0.5")
        page.locator("#thinking").select_option("off")
        page.locator("#open").click()
        with page.expect_request("**/v1/chat/completions") as sent:
            hold.left = 400
            page.locator("#ask").fill("a long one")
            page.locator("#send").click()
        body = sent.value.post_data_json
        assert body["messages"][0] == {"role": "system", "content": "Be brief."} and body["temperature"] == 0.5
        assert body["chat_template_kwargs"] == {"enable_thinking": False} and len(body["messages"]) == 4
        expect(page.locator("article.assistant").nth(1)).to_contain_text("abcdef")
        page.keyboard.press("Escape")
        expect(page.locator("#stop")).to_be_disabled()
        hold.go.set()
        assert "stopped" in page.locator("article.assistant").nth(1).inner_text()
        assert "abcdefghij " * 400 not in page.locator("article.assistant").nth(1).inner_text()
        page.locator("#fresh").click()
        assert page.locator("article").count() == 0
        assert not trouble
        page.close()


def test_a_browser_is_told_what_is_wrong(browser: Any, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    model = scripted(tmp_path / "model", script, context=24)
    with running(model, Settings(key="a-secret-key")) as address:
        page = browser.new_page()
        page.goto(address)
        expect(page.locator("#about")).to_contain_text("API key")
        page.locator("#key").fill("a-secret-key")
        page.locator("#key").press("Tab")
        expect(page.locator("#about")).to_contain_text("scripted")
        page.locator("#ask").fill("x" * 100)
        page.locator("#ask").press("Enter")
        page.wait_for_selector(".wrong")
        assert "context holds 24" in page.locator(".wrong").inner_text()
        page.close()
