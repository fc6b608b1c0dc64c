"""The prepared MLflow views, and the commands that show them: `crosstrain ui` and `crosstrain list`.

A prepared view is an experiment tag `mlflow.sharedViewState.<key>` that MLflow's web page reads. It is an undocumented
internal of the page, looked at in a browser with MLflow 3.17.2.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstrain.errors import ConfigError, TrackingError
from crosstrain.tracking.preflight import shown

if TYPE_CHECKING:
    from crosstrain.tracking.store import TrackedRun, Tracker

#: column of the runs table -> its width in pixels. On a screen of 1920 all fit beside the page's own two, also while the page's
#: assistant takes its quarter (it opens by itself at a browser's first visit).
COLUMNS = {
    "params.`framework`": 87, "params.`network`": 84, "params.`gpus`": 52, "params.`precision`": 77, "params.`batch_global`": 98,
    "metrics.`step_ms`": 72, "metrics.`samples_per_s`": 110, "metrics.`efficiency`": 80, "metrics.`accuracy`": 76,
    "tags.`outcome`": 118,
}  # fmt: skip
#: the page's own columns; of the second, `Created`, the sign of the run's state is seen, for how long ago there is no room
PAGES_OWN = {"attributes.`Run Name`": 190, "runDateAndNestInfo": 46}
#: the tag by which the table is sorted, because the page sorts by one column only: see `order`
ORDER = "order"
#: system series that get a chart of their own, of the first GPU as far as there is one
SYSTEM = (
    "cpu_utilization_percentage", "worker_cpu_percentage", "worker_memory_megabytes", "gpu_0_utilization_percentage",
    "gpu_0_memory_usage_megabytes", "gpu_0_power_usage_watts", "gpu_0_sm_clock_megahertz",
)  # fmt: skip
#: s, for the web page to come up (measured: 8 s on two cores, over a minute when they are very busy)
START_S = 240


def _key(view: str, network: str) -> str:
    return f"crosstrain-{view}" + (f"-{network}" if network else "")


def view_tag(view: str, network: str = "") -> str:
    """The experiment tag that holds a prepared view."""
    return f"mlflow.sharedViewState.{_key(view, network)}"


def page_url(base: str, experiment_id: str, view: str = "table", network: str = "") -> str:
    """Link of a prepared view below the server's address, or with view="" of MLflow's own view of all runs.

    Without workflowType MLflow opens its pages for language models; so it does for a view that is not in the store.
    """
    base = re.sub(r"://[^/@]*@", "://", base.rstrip("/"))  # no credentials in a link
    url = f"{base}/#/experiments/{experiment_id}/runs?workflowType=machine_learning"
    if view:
        url += f"&viewStateShareKey={_key(view, network)}"
    return url + ("&compareRunsMode=CHART" if view == "charts" else "")


def order(network: str, step_ms: float | None) -> str:
    """The value of the tag ORDER: sorts by network, then by step_ms, runs without it last (tags are compared as texts)."""
    return f"{network} {step_ms:014.4f}" if step_ms is not None else f"{network} without"


def view_tags(network: str = "") -> dict[str, str]:
    """The experiment tags of the table and the chart view: measured runs, by network, fastest step first; or those of one network."""
    table: dict[str, Any] = {
        "searchFilter": 'tags.kind = "run"' + (f' and params.network = "{network}"' if network else ""),
        "orderByKey": f"tags.`{ORDER}`",
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": list(COLUMNS),
        "columnOrder": [*PAGES_OWN, *COLUMNS],
        "columnWidths": {**PAGES_OWN, **COLUMNS},
        "runsHiddenMode": "SHOWALL",
    }
    charts = {
        **table,
        "compareRunCharts": _charts(),
        "compareRunSections": _SECTIONS,
        "isAccordionReordered": True,  # else the page sorts the sections by name
        "hideEmptyCharts": True,  # no GPU: no charts of it
    }
    states = {"table": table, "charts": charts}
    return {view_tag(view, network): json.dumps(state) for view, state in states.items()}


def _section(name: str, display: bool = True) -> dict[str, Any]:
    """A section takes in the charts that the page adds by itself for the metrics `<name>/…`; reordered: after ours."""
    return {"uuid": name, "name": name, "display": display, "isReordered": True}


# The last two have the page's own names: for `system/…`, and for all that has no prefix, a bar chart each (folded: the table has them).
_SECTIONS = [_section("summary"), _section("epoch"), _section("iter"), _section("System metrics"), _section("Model metrics", False)]


def _charts() -> list[dict[str, Any]]:
    """Ours, section by section; the page adds those of the other metrics."""
    compared = ["framework", "network", "gpus", "precision"]
    by_seconds = {"xAxisKey": "metric", "selectedXAxisMetricKey": "epoch/train_s"}  # of training, evaluation left out
    charts: list[dict[str, Any]] = [
        *({"type": "BAR", "metricKey": key, "metricSectionId": "summary"} for key in ("step_ms", "samples_per_s", "accuracy")),
        {
            "type": "SCATTER",
            "xaxis": {"key": "gpus", "type": "PARAM"},
            "yaxis": {"key": "samples_per_s", "type": "METRIC"},
            "metricSectionId": "summary",
        },
        {"type": "BAR", "metricKey": "efficiency", "metricSectionId": "summary"},
        {"type": "PARALLEL", "selectedParams": compared, "selectedMetrics": ["step_ms"], "metricSectionId": "summary"},
        {**_line("epoch/accuracy", "epoch"), **by_seconds},
        *(_line(f"iter/{name}", "iter") for name in ("ms", "loss", "accuracy")),
        *({**_line(f"system/{name}", "System metrics"), "xAxisKey": "time-relative"} for name in SYSTEM),
    ]
    common = {"runsCountToCompare": 30, "deleted": False, "isGenerated": False}
    return [{**chart, "uuid": f"c{index}", **common} for index, chart in enumerate(charts, 1)]


def _line(key: str, section: str) -> dict[str, Any]:
    return {
        "type": "LINE", "metricKey": key, "selectedMetricKeys": [key], "metricSectionId": section, "range": {}, "useGlobalXaxisKey": False,
        "xAxisKey": "step", "selectedXAxisMetricKey": "", "xAxisScaleType": "linear", "scaleType": "linear", "lineSmoothness": 0,
    }  # fmt: skip


# -- commands ----------------------------------------------------------------------------------------------------------------
def add_command(subparsers: Any) -> None:
    """Register `ui` and `list`; each sets `function`, which takes the parsed arguments and returns the exit code."""
    store = store_arguments()
    ui = subparsers.add_parser("ui", parents=[store], help="open the results in MLflow's web page")
    ui.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    ui.add_argument("--port", type=int, default=5000, help="default: %(default)s")
    ui.set_defaults(function=_run_ui)

    last = subparsers.add_parser("list", parents=[store], help="print the last runs")
    last.add_argument("-n", "--number", type=int, default=20, help="how many (default: %(default)s)")
    last.set_defaults(function=_run_list)


def store_arguments() -> argparse.ArgumentParser:
    """The options by which every command names the store."""
    store = argparse.ArgumentParser(add_help=False)
    store.add_argument("--uri", help="tracking store (default: $MLFLOW_TRACKING_URI, else mlruns/ of this directory)")
    store.add_argument("--experiment", help="default: $MLFLOW_EXPERIMENT_NAME, else crosstrain")
    return store


def tracker_of(arguments: argparse.Namespace) -> Tracker:
    """The store that `store_arguments` name."""
    from crosstrain.tracking.store import Tracker

    return Tracker(arguments.uri, arguments.experiment, Path.cwd())


def _run_ui(arguments: argparse.Namespace) -> int:
    with contextlib.suppress(KeyboardInterrupt):
        tracker = tracker_of(arguments)
        if not tracker.is_server:
            _check_port(arguments.host, arguments.port)
        tracker.connect()
        if not tracker.is_server:
            return _serve(tracker, arguments.host, arguments.port)
        _print_links(tracker, "")
    return 0


def _check_port(host: str, port: int) -> None:
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port {port}: must be 1 to 65535")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT is not taken
            probe.bind(address)
    except OSError as error:
        hint = f"choose another, such as --port {port % 60000 + 1}"
        raise ConfigError(f"--host {host} --port {port} can not be used ({error.strerror}): {hint}") from None


def _serve(tracker: Tracker, host: str, port: int) -> int:
    """Run the web page until Ctrl-C. Its processes have a session of their own, so that they end without tracebacks."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    # By the environment, because command lines are public and a database's URI may hold a password. The logging level of
    # prepare_environment would hide the server's errors.
    environment = {
        **os.environ,
        "MLFLOW_BACKEND_STORE_URI": tracker.uri,
        "MLFLOW_REGISTRY_STORE_URI": tracker.uri,
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": str(tracker.artifact_root),
        "MLFLOW_UVICORN_OPTS": "--log-level warning",
        # eight more processes, for jobs about language models
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "PYTHONWARNINGS": "ignore",
    }
    base = f"http://{'127.0.0.1' if host in ('0.0.0.0', '') else host}:{port}"
    print(f"starting MLflow's web page for {shown(tracker.uri)}", flush=True)
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _wait_until_up(server, base)
        _print_links(tracker, base)
        print("end it with Ctrl-C", flush=True)
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        _stop(server)
        signal.signal(signal.SIGTERM, before)


def _wait_until_up(server: subprocess.Popen[bytes], base: str) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if server.poll() is not None:
            raise TrackingError(f"MLflow's web page ended at once with exit code {server.returncode}; its words are above")
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise TrackingError(f"MLflow's web page did not come up within {START_S} s")


def _stop(server: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(5)


def _print_links(tracker: Tracker, base: str) -> None:
    print(f"table:  {tracker.ui_url(base, 'table')}")
    print(f"charts: {tracker.ui_url(base, 'charts')}")
    print(f"plain:  {tracker.ui_url(base, '')}  (MLflow's own view, should a prepared one fail)", flush=True)


def _run_list(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    if arguments.number < 1:
        raise ConfigError(f"--number {arguments.number}: must be 1 or more")
    tracker = tracker_of(arguments)
    tracker.connect()
    table = Table(box=None)
    table.add_column("name", overflow="fold")
    table.add_column("outcome")
    for header in ("step_ms", "samples_per_s", "accuracy"):
        table.add_column(header, justify="right")
    table.add_column("started")
    for run in tracker.latest_runs(arguments.number):
        table.add_row(*_row(run))
    Console().print(table)
    return 0


def _row(run: TrackedRun) -> tuple[str, ...]:
    started = datetime.datetime.fromtimestamp(run.start_ms / 1000).strftime("%Y-%m-%d %H:%M")
    numbers = (run.metrics.get(key) for key in ("step_ms", "samples_per_s", "accuracy"))
    outcome = run.tags.get("outcome") or run.status.lower()
    return (run.name, outcome, *("" if n is None else f"{n:.4g}" for n in numbers), started)
