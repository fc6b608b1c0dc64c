"""The pictures of the README: `crosstrain ui` in one terminal, `python docs/take_pictures.py <table link> <charts link>` in another.

Needs Debian's chromium and chromium-driver, and selenium (the extra `test`).
"""

import shutil
import sys
import time
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

HERE = Path(__file__).parent
#: s, for the page to load and to draw
PATIENCE_S = 25


def main(table: str, charts: str) -> None:
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "lang=en-US"):
        options.add_argument(f"--{flag}")
    browser = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        for link, name, size in ((table, "runs_table.png", (1600, 860)), (charts, "charts.png", (1800, 1750))):
            browser.set_window_size(*size)
            browser.get("about:blank")
            browser.get(link)
            time.sleep(PATIENCE_S)
            # MLflow's assistant opens at the first visit, and the note about the view is the same on both
            for label in ("Close", "close"):
                for button in browser.find_elements("css selector", f"button[aria-label='{label}']"):
                    browser.execute_script("arguments[0].click()", button)
            time.sleep(PATIENCE_S / 3)
            browser.save_screenshot(str(HERE / name))
    finally:
        browser.quit()


if __name__ == "__main__":
    main(*sys.argv[1:])
