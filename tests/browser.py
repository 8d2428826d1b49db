"""Debian's Chromium without a screen: what tests and benchmarks of pages look through."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

# As root there is no sandbox, and a container's /dev/shm is small; the rest keeps the browser from doing anything that
# the page did not ask for.
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Browser(webdriver.Chrome):
    """A driver that remembers what its pages said on the console, asked the network for, and opened as a dialog."""

    def __init__(self, options: webdriver.ChromeOptions, service: Service) -> None:
        super().__init__(options=options, service=service)
        self._events: list[tuple[str, dict[str, Any]]] = []

    def view(self, *, dark: bool = False, width: int = 1400, height: int = 1000) -> None:
        """From here on, pages are this many CSS pixels wide and high and see this colour scheme.

        The size is emulated: a real window of Chromium is never narrower than 500 pixels.
        """
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, page: Path | str) -> None:
        """Load a file, or an address, and wait until it is there."""
        self.get(page.absolute().as_uri() if isinstance(page, Path) else page)
        WebDriverWait(self, 20).until(lambda _: self.execute_script("return document.readyState") == "complete")

    def forget(self) -> None:
        """Count what was said on the console, asked for and opened from here on."""
        self.console()
        self.get_log("performance")
        self._events.clear()

    def console(self) -> list[str]:
        """What the console has said since the last call: errors, warnings, refusals of the page's policy."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.get_log("browser")]

    def requests(self) -> list[str]:
        """Every address that a page has asked for since the start, in order; inlined `data:` is none."""
        sent = [event["request"]["url"] for event in self._all("Network.requestWillBeSent")]
        return [url for url in sent if not url.startswith("data:")]

    def alerts(self) -> list[str]:
        """The texts of all dialogs (alert, confirm, prompt) that pages have opened since the start."""
        return [event["message"] for event in self._all("Page.javascriptDialogOpening")]

    def _all(self, method: str) -> list[dict[str, Any]]:
        for entry in self.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            self._events.append((message["method"], message["params"]))
        return [params for name, params in self._events if name == method]


@contextmanager
def chromium(*, dark: bool = False, width: int = 1400, height: int = 1000) -> Iterator[Browser]:
    """A new browser with an empty profile. Where none is installed the test is skipped, under `CI` it fails."""
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if missing := [name for name, path in programs.items() if path is None]:
        reason = f"{' and '.join(missing)} not found; on Debian: apt-get install chromium chromium-driver"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:  # its processes end a little later
        options = webdriver.ChromeOptions()
        options.binary_location = str(programs["chromium"])
        for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
            options.add_argument(argument)
        # Not the new-tab page, which asks for some 300 files of its own.
        prefs = {"session.restore_on_startup": 4, "session.startup_urls": ["about:blank"]}
        options.add_experimental_option("prefs", prefs)
        options.unhandled_prompt_behavior = "accept"  # an alert is remembered and does not stop the test
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        # With a path, selenium does not go looking for a driver of its own.
        browser = Browser(options, Service(str(programs["chromedriver"])))
        try:
            browser.view(dark=dark, width=width, height=height)
            yield browser
        finally:
            browser.quit()
