"""Headless Chromium, and a record of the requests and complaints of a page in it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WAIT_MS = 30_000  # for what the page will show; a busy machine is slow


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser of Debian's package: Playwright brings the driver only. Skips where either is not installed."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (longshore[dev])")
    if CHROMIUM is None:
        pytest.skip("no chromium is installed (apt-get install chromium)")
    arguments = ["--disable-dev-shm-usage", "--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watched:
    """A page, and what it asked and complained of."""

    page: Page
    origin: str
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def check(self, *expected: str) -> None:
        """Check that no other server got a request and that each error contains one of `expected`."""
        elsewhere = [url for url in self.requests if not url.startswith((f"{self.origin}/", "blob:", "data:"))]
        bad = [text for text in self.complaints if not any(part in text for part in expected)]
        if elsewhere or bad:
            raise AssertionError(f"asked elsewhere: {elsewhere}; complained: {bad}")

    def paths(self) -> list[str]:
        return [urlsplit(url).path for url in self.requests]


@contextlib.contextmanager
def watched(browser: Browser, origin: str, **options: Any) -> Iterator[Watched]:
    """A new page at `origin`'s root, in a context of its own; `options` are the context's."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    found = Watched(page, origin)
    page.on("request", lambda request: found.requests.append(request.url))
    page.on("pageerror", lambda error: found.complaints.append(str(error)))
    page.on("console", lambda said: found.complaints.append(said.text) if said.type in ("error", "warning") else None)
    try:
        page.goto(f"{origin}/")
        yield found
    finally:
        context.close()


def expect(thing: Any) -> Any:
    """Return Playwright's `expect`, with WAIT_MS for its timeout. Imports Playwright on first use."""
    from playwright.sync_api import expect as found

    found.set_options(timeout=WAIT_MS)
    return found(thing)


def axe_violations(page: Page) -> list[str]:
    """Return axe-core's findings about keyboards, screen readers and contrast."""
    sync_axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed (longshore[dev])"
    )
    response = sync_axe.Axe().run(page).response
    return [
        f"{violation['id']}: {node['target']} {node.get('failureSummary', '')}"
        for violation in response["violations"]
        for node in violation["nodes"]
    ]
