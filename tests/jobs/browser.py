"""A real headless Chromium, for pages that have to work in one; skipped where there is none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--disable-dev-shm-usage", "--force-prefers-reduced-motion"),
)


@contextmanager
def browser(profile: Path) -> Iterator[Any]:
    """Start Chromium with an empty profile, its console and its requests recorded."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no chromium: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,1000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.chrome.service.Service(driver)
    found = webdriver.Chrome(options=options, service=service)
    try:
        yield found
    finally:
        found.quit()
        service.stop()


def console(page: Any) -> list[str]:
    """Return what the page wrote to the console, errors of its own and of the browser."""
    return [entry["message"] for entry in page.get_log("browser")]


def outside_requests(page: Any, *, with_blocked: bool = True) -> list[str]:
    """Return every address that was asked for and lies neither in the file nor on the disk.

    `with_blocked` counts what the page's own policy stopped before it was sent.
    """
    urls: dict[str, str] = {}
    for entry in page.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        parameters = message["params"]
        if message["method"] == "Network.requestWillBeSent":
            urls[parameters["requestId"]] = parameters["request"]["url"]
        elif parameters.get("blockedReason") == "csp" and not with_blocked:
            urls.pop(parameters["requestId"], None)
    local = ("file:", "data:", "chrome:", "about:")
    return [url for url in urls.values() if not url.startswith(local)]
