"""The page to chat in a real browser: under its own policy, at every width, by keyboard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)
    if path is None:
        pytest.skip("needs chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, live: Any) -> Iterator[Any]:
    """The page; nothing may go wrong on it, and nothing may be asked of anybody else. Answers are greedy: drawn ones
    can fill the context, which is an error."""

    def greedy(route: Any) -> None:
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "temperature": 0}))

    page = browser.new_page()
    page.set_default_timeout(120_000)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda problem: problems.append(str(problem)))
    page.on("request", lambda r: None if r.url.startswith(live.url) else problems.append(r.url))
    page.route("**/v1/chat/completions", greedy)
    page.goto(live.url)
    page.locator("#model option").wait_for(state="attached")
    yield page
    page.close()
    assert [p for p in problems if "favicon" not in p] == []


def answered(page: Any) -> None:
    """Wait for the end of an answer. (A condition in JavaScript would need eval, which the page forbids.)"""
    page.locator(".assistant p").first.wait_for(state="attached")
    page.locator("#send:enabled").wait_for()


def test_a_conversation_by_keyboard(page: Any) -> None:
    page.keyboard.type("m")  # the field has the focus
    page.keyboard.press("Enter")
    answer = page.locator(".assistant p").first
    answered(page)
    assert answer.inner_text() == "no"
    assert "tokens/s" in page.locator(".assistant .speed").first.inner_text()
    page.keyboard.type("and\nmore")  # the field has the focus again; a plain Enter sends
    page.locator(".user").nth(1).wait_for()
    page.keyboard.press("Escape")
    answered(page)
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0


def test_generated_text_is_text_and_errors_are_shown(page: Any) -> None:
    content = "<img src=x onerror=alert(1)>"
    bodies = ['{"error":{"message":"it broke"}}', '{"choices":[{"delta":{"content":"%s"}}]}' % content]  # noqa: UP031
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=f"data: {bodies.pop()}\n\n", content_type="text/event-stream"),
    )
    page.keyboard.type("x")
    page.keyboard.press("Enter")
    answered(page)
    assert page.locator(".assistant p").inner_text() == content
    assert page.locator("img").count() == 0
    page.keyboard.type("x")
    page.keyboard.press("Enter")
    page.locator(".error p").wait_for()
    assert page.locator(".error p").inner_text() == "it broke"
    assert page.locator("#status").inner_text() == "Error: it broke"


def test_widths_colors_names_and_roles(page: Any) -> None:
    """From a small phone to 4k, and nothing without a name for those who can't see it."""
    page.evaluate("turn('user', 'word '.repeat(300) + 'x'.repeat(500)); turn('assistant', 'y'.repeat(3000))")
    for width, height in ((360, 640), (1280, 720), (3840, 2160)):
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        for name in ("#text", "#send", "#stop", "#clear", "#model"):
            box = page.locator(name).bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] + box["height"] <= height
            assert box["height"] >= 24
    colors = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colors.append(page.evaluate("getComputedStyle(document.body).color"))
    assert colors == ["rgb(0, 0, 0)", "rgb(255, 255, 255)"]
    for role, name in (("textbox", "Message"), ("button", "Send"), ("button", "Stop"), ("combobox", "Model")):
        assert page.get_by_role(role, name=name).count() == 1
    assert page.get_by_role("log", name="Conversation").count() == 1
    assert page.locator("html").get_attribute("lang") == "en"


def test_the_policy_allows_nothing_else(live: Any) -> None:
    with live.http() as http:
        policy = http.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
