"""Pictures of the live page, in a real browser: light, dark, and on a phone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from playwright.async_api import async_playwright, expect

CHROMIUM: Final = os.environ.get("CHROMIUM", "/usr/bin/chromium")
_WINDOWS: Final[Mapping[str, Mapping[str, Any]]] = {
    "live-page": {"viewport": {"width": 900, "height": 600}},
    "live-page-dark": {"viewport": {"width": 900, "height": 600}, "color_scheme": "dark"},
    "live-page-phone": {"viewport": {"width": 360, "height": 740}},
}
_MILLISECONDS: Final = 60_000.0


async def draw_live_page(address: str, folder: Path) -> None:
    """One picture a window, as soon as requests are on their way and a rate is known."""
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            for name, window in _WINDOWS.items():
                page = await chromium.new_page(**window)
                await page.goto(f"http://{address}/")
                arriving = page.locator(".walk:has(.announced):has(.pulled)").first
                await expect(arriving).to_be_visible(timeout=_MILLISECONDS)
                await expect(page.locator("#numbers")).not_to_contain_text("–")
                await page.screenshot(path=folder / f"{name}.png", full_page=True)
                await page.close()
        finally:
            await chromium.close()
