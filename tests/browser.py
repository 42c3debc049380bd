"""A real browser for the tests of pages: the machine's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, Response, sync_playwright

CHROMIUM = next((found for n in ("chromium", "google-chrome") if (found := shutil.which(n))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium or google-chrome on this machine"
)
# Nothing of the browser's own may ask the network: the tests count what the page asks.
QUIET = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip


@contextmanager
def chromium() -> Iterator[Browser]:
    """One headless browser; a module's fixture may keep it, a session's may not.

    Playwright's synchronous interface keeps an event loop running in this thread until it is left,
    so a test that calls `asyncio.run` meanwhile fails.
    """
    assert CHROMIUM is not None, "mark the test with needs_chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page and what it complained of: console warnings and errors, exceptions, failed loads."""

    def __init__(self, browser: Browser, **context: Any) -> None:
        """`context` goes to Playwright's `new_context`: viewport, color_scheme, offline, …"""
        self._context = browser.new_context(**context)
        self.page: Page = self._context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        self.page.on("request", self._on_request)
        self.page.on("requestfailed", lambda r: self.complaints.append(f"failed: {r.url}"))
        self.page.on("response", self._on_response)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith(("data:", "blob:")):
            self.requests.append(request.url.partition("#")[0])

    def _on_response(self, response: Response) -> None:
        if response.status >= 400:
            self.complaints.append(f"{response.status}: {response.url}")

    def open(self, address: str | Path) -> Page:
        """Load a file, with all of its sections open, or a URL, and wait until it is loaded."""
        self.page.goto(f"{address.as_uri()}#unfolded" if isinstance(address, Path) else address)
        return self.page

    def close(self) -> None:
        self._context.close()
