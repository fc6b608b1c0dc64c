"""What a newcomer sees who opens the printed links: MLflow's own pages, in a real browser, filled by real runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import PUBLISHED, QUICK, needs, run_train, store, stored_runs, wait_for
from crosstrain.tracking import view
from servers import free_port

#: of waiting for the page, s: MLflow's takes 8 s to start on two quiet cores
PATIENCE_S = 240
COLUMNS = ["framework", "network", "gpus", "precision", "batch_global", "step_ms", "samples_per_s", "efficiency", "accuracy", "outcome"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium without a window, as large as a usual screen, with an empty profile."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        needs("apt", "apt-get install chromium chromium-driver")
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = chromium
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "window-size=1920,1080", "lang=en-US"):
        options.add_argument(f"--{flag}")
    chrome = Chrome(options=options, service=Service(driver))
    chrome.set_page_load_timeout(PATIENCE_S)
    chrome.set_script_timeout(PATIENCE_S)
    yield chrome
    chrome.quit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, framework_python) -> Path:
    """A start directory with runs: two networks, fast and slow, on one and two replicas; one run with accuracy, one unsupported."""
    framework_python("torch")
    folder = tmp_path_factory.mktemp("ui")
    usual = [*QUICK, "device=cpu"]
    fakes = ["framework=fake", "network=lenet,fcn_r", "framework.step_ms=4,12", "replicas=1,2", "threads=1", "data=synthetic"]
    done = run_train(folder, "-m", *fakes, *usual, "device.oversubscribe=true", timeout=PATIENCE_S)
    assert done.code == 0, done
    done = run_train(folder, "-m", "framework=torch", "threads=1,999", "epochs=2", "data.samples=256", *usual, timeout=PATIENCE_S)
    assert [row["outcome"] for row in done.outcomes][1] == "unsupported" and "see them: crosstrain ui" in done.out, done
    return folder


@pytest.fixture(scope="module")
def links(folder: Path) -> Iterator[dict[str, str]]:
    """The links that `crosstrain ui` prints, while it serves the store of its start directory."""
    command = [sys.executable, "-m", "crosstrain.cli", "ui", "--port", str(free_port())]
    log = folder / "ui.log"
    with open(log, "w") as out:
        page = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for(lambda: "Ctrl-C" in log.read_text() or page.poll() is not None, PATIENCE_S, "crosstrain ui")
        words = [line.split() for line in log.read_text().splitlines()]
        yield {line[0].rstrip(":"): line[1] for line in words if line[0] in ("table:", "charts:", "plain:")}
    finally:
        page.send_signal(signal.SIGINT)
        try:
            assert page.wait(60) == 0
        except subprocess.TimeoutExpired:
            os.killpg(page.pid, signal.SIGKILL)
            raise


def visit(browser: Any, link: str) -> None:
    browser.get("about:blank")  # the page would only change its route
    browser.get(link)


def eventually(browser: Any, script: str, what: str, good: Any = bool) -> Any:
    """The script's value, once it is good; a page that shows something else fails with what it shows."""
    value: Any = None

    def look() -> bool:
        nonlocal value
        value = browser.execute_script(script)
        return bool(good(value))

    try:
        wait_for(look, PATIENCE_S, what)
    except AssertionError:
        text = browser.execute_script("return document.body.innerText")
        raise AssertionError(f"{what}: {value!r} on a page that says: {text[:3000]}") from None
    return value


#: names of the columns whose whole header lies inside what the table shows, from left to right
SEEN = """
const box = document.querySelector('.ag-header-viewport')
if (!box) return []
const seen = box.getBoundingClientRect()
return [...box.querySelectorAll('.ag-header-cell')].map(cell => [cell.getBoundingClientRect(), cell.innerText.trim()])
  .filter(([own]) => own.left >= seen.left - 1 && own.right <= Math.min(seen.right, innerWidth) + 1)
  .sort(([a], [b]) => a.left - b.left).map(([_, text]) => text)
"""
#: the rows from top to bottom, column -> text
ROWS = """
const rows = [...document.querySelectorAll('.ag-center-cols-container .ag-row')]
rows.sort((a, b) => a.getAttribute('row-index') - b.getAttribute('row-index'))
return rows.map(row => Object.fromEntries([...row.querySelectorAll('[col-id]')].map(
  cell => [cell.getAttribute('col-id').replace(/^\\w+\\.`|`$/g, ''), cell.innerText.trim()])))
"""
#: the names of the runs in the list
NAMES = """
return [...document.querySelectorAll('[col-id="attributes.`Run Name`"].ag-cell')].map(cell => cell.innerText.trim().split('\\n').pop())
"""


def test_the_table_shows_all_columns_sorted_by_network_and_step_ms(browser, folder, links):
    visit(browser, links["table"])
    headers = eventually(browser, SEEN, "columns of the table", lambda seen: set(COLUMNS) <= set(seen))
    assert [header for header in headers if header in COLUMNS] == COLUMNS
    runs = stored_runs(folder)
    rows = eventually(browser, ROWS, "rows of the table", lambda rows: len(rows) == len(runs) and all("outcome" in row for row in rows))
    places = [(row["network"], float(row["step_ms"]) if row["step_ms"] != "-" else float("inf")) for row in rows]
    assert places == sorted(places)
    assert {network for network, _ in places} == {"fcn_r", "lenet"} and len({step_ms for _, step_ms in places}) >= 4
    outcomes = [row["outcome"] for row in rows]
    assert outcomes.count("unsupported") == 1 and outcomes[-1] == "unsupported" and set(outcomes[:-1]) <= set(PUBLISHED)
    (torch,) = [row for row in rows if row["framework"] == "torch" and row["step_ms"] != "-"]
    assert 0 <= float(torch["accuracy"]) <= 1 and torch["precision"] == "fp32" and torch["batch_global"] == "64"
    # speed-ups come at the end of a command: of one device 1, of two fakes that take the same time 0.5
    assert {round(float(row["efficiency"]), 1) for row in rows if row["efficiency"] != "-"} >= {1.0, 0.5}


#: title of each chart -> (marks drawn in it, title of its x axis)
CHARTS = """
const found = {}
for (const plot of document.querySelectorAll('.js-plotly-plot')) {
  let card = plot
  while (card && !card.querySelector('h4, h5, [title]')) card = card.parentElement
  const title = card ? card.querySelector('h4, h5, [title]').innerText.trim() : ''
  const marks = plot.querySelectorAll('.barlayer .point path, .scatterlayer .trace').length
  const axis = plot.querySelector('.xtitle')
  found[title] = [marks, axis ? axis.textContent : '']
}
return found
"""
SCROLL = "const area = document.querySelector('[data-testid=experiment-view-compare-runs-chart-area]'); if (area) area.scrollTop = {}"


def charts_seen(browser: Any) -> dict[str, list[Any]]:
    """All charts from top to bottom: they are drawn as they come into view."""
    found: dict[str, list[Any]] = {}
    for top in range(0, 4000, 350):
        browser.execute_script(SCROLL.format(top))
        found |= {title: chart for title, chart in browser.execute_script(CHARTS).items() if chart[0] or title not in found}
    return found


def test_the_charts_are_drawn(browser, folder, links):
    visit(browser, links["charts"])
    numbered = [run for run in stored_runs(folder) if "step_ms" in run.data.metrics]
    wanted = {
        "step_ms": (len(numbered), ""), "samples_per_s": (len(numbered), ""), "accuracy": (1, ""),
        "gpus vs. samples_per_s": (1, "gpus"),
        "epoch/accuracy": (1, "epoch/train_s"),
        "iter/ms": (len(numbered), "Step"), "iter/loss": (len(numbered), "Step"),
        "system/worker_memory_megabytes": (1, "Relative Time"), "system/cpu_utilization_percentage": (1, "Relative Time"),
    }  # fmt: skip
    seen: dict[str, list[Any]] = {}

    def all_drawn() -> bool:
        seen.update({title: chart for title, chart in charts_seen(browser).items() if chart[0]})
        return all(seen.get(title, [0])[0] >= marks for title, (marks, _) in wanted.items())

    try:
        wait_for(all_drawn, PATIENCE_S, "the charts")
    except AssertionError:
        raise AssertionError(f"wanted {wanted}, seen {seen}") from None
    for title, (_, axis) in wanted.items():
        assert axis in seen[title][1], (title, seen[title])


def test_a_page_that_knows_no_such_view_is_the_plain_page(browser, folder, links):
    """As in an MLflow that has dropped views (it does not know the key in the link), or that finds nothing it knows in ours."""
    client = store(folder)
    (experiment,) = [one for one in client.search_experiments() if one.name == "crosstrain"]
    client.set_experiment_tag(experiment.experiment_id, view.view_tag("other"), '{"theirs": 1}')
    other = links["table"].replace("crosstrain-table", "crosstrain-other")
    for link in (links["plain"], links["table"].replace("viewStateShareKey", "viewStateDropped"), other):
        visit(browser, link)
        names = eventually(browser, NAMES, f"the plain page of {link}", lambda names: "lenet-torch-cpu-1thread" in names)
        assert len(names) == len(stored_runs(folder))


def test_the_order_of_the_table():
    rows = [("lenet", 9.5), ("alexnet", 1000.0), ("lenet", None), ("alexnet", None), ("lenet", 0.25), ("lenet", 10.0), ("alexnet", 99.9)]
    texts = sorted(view.order(*row) for row in rows)
    assert texts == [view.order(*row) for row in (rows[6], rows[1], rows[3], rows[4], rows[0], rows[5], rows[2])]


def test_the_view_asks_for_the_columns_in_their_order():
    table = json.loads(view.view_tags()["mlflow.sharedViewState.crosstrain-table"])
    assert [column.split("`")[1] for column in table["selectedColumns"]] == COLUMNS
    assert table["columnOrder"][-len(COLUMNS) :] == table["selectedColumns"]
