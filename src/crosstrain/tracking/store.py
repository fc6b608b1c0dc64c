"""The tracking store of a sweep: found, checked, written and read through MlflowClient with explicit run ids."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from crosstrain.errors import TrackingError
from crosstrain.tracking import preflight as checks
from crosstrain.tracking import proof
from crosstrain.tracking import upload as uploads
from crosstrain.tracking.identity import host_name, is_alive, own_tags
from crosstrain.tracking.proof import Proof
from crosstrain.tracking.series import RunRecord
from crosstrain.tracking.view import page_url, view_tag, view_tags

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

DEFAULT_EXPERIMENT = "crosstrain"
#: Outcomes whose numbers are published (unstable and contaminated ones flagged).
PUBLISHED = ("ok", "unstable", "contaminated")
_PAGE = 1000
#: s; on a network file system a RUNNING run of another host that is older counts as forgotten.
_OTHER_HOST_S = 24 * 3600


@dataclass(frozen=True)
class TrackedRun:
    """A run as the store has it; metrics are the latest values."""

    run_id: str
    name: str
    status: str
    start_ms: int
    end_ms: int | None
    params: dict[str, str]
    tags: dict[str, str]
    metrics: dict[str, float]


class Tracker:
    """Writes runs into one experiment of one store. Every method that talks to the store raises TrackingError, one line."""

    def __init__(self, uri: str | None, experiment: str | None, start_dir: Path) -> None:
        """`uri`, `experiment`: the configuration's, where empty MLflow's own variables, else mlruns/ below `start_dir`."""
        checks.prepare_environment()
        self.start_dir = start_dir.absolute()
        self.default_uri = f"sqlite:///{self.start_dir / 'mlruns' / 'mlflow.db'}"
        self.uri = self._resolve(uri or os.environ.get("MLFLOW_TRACKING_URI") or self.default_uri)
        self.experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_EXPERIMENT
        self.experiment_id = ""
        """known after `preflight` or `connect`"""
        self._client: MlflowClient | None = None
        self._failed = False

    def _resolve(self, uri: str) -> str:
        """A relative SQLite path is meant from the start directory, wherever the process goes later."""
        head, slashes, path = uri.partition("///")
        if head.startswith("sqlite") and slashes and not path.startswith(("/", ":memory:")):
            return f"{head}///{self.start_dir / path}"
        return uri

    @property
    def shown_uri(self) -> str:
        """The store's address without its password."""
        return checks.shown(self.uri)

    @property
    def is_server(self) -> bool:
        return self.uri.startswith(("http://", "https://"))

    @property
    def is_sqlite(self) -> bool:
        return self.uri.startswith("sqlite")

    @property
    def is_new(self) -> bool:
        """Whether `preflight` will first create an SQLite store, which takes some seconds, once."""
        return self.is_sqlite and not checks.sqlite_path(self.uri).exists()

    @property
    def artifact_root(self) -> str | None:
        """Where a new experiment keeps its artifacts; None leaves it to the server.

        MLflow's own default for a database is ./mlruns in the current directory.
        """
        if self.is_server or "://" not in self.uri:
            return None
        if root := os.environ.get("MLFLOW_DEFAULT_ARTIFACT_ROOT"):
            return root
        folder = checks.sqlite_path(self.uri).parent if self.is_sqlite else self.start_dir / "mlruns"
        return (folder / "artifacts").as_uri()

    # -- before the first run -----------------------------------------------------------------------------------------------
    def preflight(self) -> None:
        """Check the store, create what is missing, close the runs that dead drivers of this host left RUNNING.

        Raises TrackingError within about 15 s; only the creation of a new SQLite store may take longer.
        """
        with self._told(), checks.impatient():
            self._check_uri()
            if self.is_sqlite:
                database = checks.sqlite_path(self.uri)
                if self.uri == self.default_uri:
                    database.parent.mkdir(parents=True, exist_ok=True)
                elif not database.parent.is_dir():
                    raise TrackingError(f"tracking store {self.uri}: the folder {database.parent} does not exist: create it")
                if os.environ.get("SUBMITIT_EXECUTOR") == "slurm" and checks.file_system(database) in checks.NETWORK_FILE_SYSTEMS:
                    raise TrackingError(
                        f"tracking store {self.uri} is an SQLite file on a network file system, into which only one host may write: "
                        "this job keeps its run in its folder, and the command that started the sweep brings it into the store"
                    )
                with checks.locked(database, self.uri):
                    if not database.exists() or database.stat().st_size == 0:
                        checks.create_sqlite(database, str(self.artifact_root))
                    checks.check_sqlite(database, self.uri)
                    self._prepare()
            elif self.is_server:
                checks.check_answers(self.uri)
                import mlflow.tracking  # noqa: F401  seconds that the server must not be blamed for

                checks.within(checks.DEADLINE_S - 3, self._prepare_server, checks.shown(self.uri))
            else:
                checks.within(checks.DEADLINE_S, lambda: checks.check_database(self.uri), checks.shown(self.uri))
                self._prepare()

    def connect(self) -> None:
        """Open a store that exists, for reading: creates nothing. Raises TrackingError, also when the experiment is missing."""
        with self._told(), checks.impatient():
            self._check_uri()
            if self.is_sqlite:
                database = checks.sqlite_path(self.uri)
                if not database.exists():
                    raise TrackingError(f"no tracking store at {database}: run `python train.py` there first, or name one by --uri")
                checks.check_sqlite(database, self.uri)
            elif self.is_server:
                checks.check_answers(self.uri)
                checks.check_server(self.uri)
            else:
                checks.check_database(self.uri)
            experiment = self.client.get_experiment_by_name(self.experiment)
            if experiment is None:
                raise TrackingError(f"no experiment {self.experiment} in {checks.shown(self.uri)}: nothing was tracked yet")
            self.experiment_id = experiment.experiment_id

    def _check_uri(self) -> None:
        scheme = urlsplit(self.uri).scheme
        if scheme in ("", "file"):
            raise checks.file_store_error(self.uri, self.default_uri)
        if self.is_sqlite and checks.sqlite_path(self.uri).name in ("", ":memory:"):
            raise TrackingError(f"tracking.uri={self.uri} names no file: write sqlite:////absolute/path/mlflow.db")
        known = ("http", "https", "sqlite", "postgresql", "mysql", "mssql")
        if scheme.partition("+")[0] not in known:
            raise TrackingError(f"tracking.uri={checks.shown(self.uri)}: unknown scheme {scheme}; known are {', '.join(known)}")

    def _prepare_server(self) -> None:
        checks.check_server(self.uri)
        self._prepare()
        # a login that may only read would let the sweep start, and then refuse each of its runs
        self.client.set_experiment_tag(self.experiment_id, "crosstrain", "measured runs")

    def _prepare(self) -> None:
        self.experiment_id = self._get_or_create_experiment()
        self._prepare_views(view_tags())
        running = self._search("attributes.status = 'RUNNING'")
        self._refuse_other_hosts(running)
        self._close_stale(running)

    def _get_or_create_experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        root = self.artifact_root
        for _ in range(2):
            experiment = self.client.get_experiment_by_name(self.experiment)
            if experiment is not None:
                break
            try:
                location = f"{root}/{uploads.legal_key(self.experiment).replace(' ', '_')}" if root else None
                return self.client.create_experiment(self.experiment, location)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another driver was faster: look again
                    raise
        if experiment is None:
            raise TrackingError(f"tracking store {checks.shown(self.uri)}: the experiment {self.experiment} can not be created")
        if experiment.lifecycle_stage == "deleted":
            raise TrackingError(
                f"experiment {self.experiment} is deleted in {checks.shown(self.uri)}: "
                f"`mlflow experiments restore -x {experiment.experiment_id}`, or choose another name by tracking.experiment"
            )
        return experiment.experiment_id

    def _prepare_views(self, tags: dict[str, str]) -> None:
        """Best effort: a store whose views can not be written still tracks."""
        with contextlib.suppress(Exception):
            present = self.client.get_experiment(self.experiment_id).tags
            for key, value in tags.items():
                if present.get(key) != value:
                    self.client.set_experiment_tag(self.experiment_id, key, value)

    def _refuse_other_hosts(self, running: list[Run]) -> None:
        if not self.is_sqlite or checks.file_system(checks.sqlite_path(self.uri)) not in checks.NETWORK_FILE_SYSTEMS:
            return
        recent = (time.time() - _OTHER_HOST_S) * 1000
        others = {run.data.tags.get("host", "") for run in running if run.info.start_time > recent} - {"", host_name()}
        if others:
            raise TrackingError(
                f"tracking store {self.uri} is on a network file system and in use by {', '.join(sorted(others))}: hosts can not "
                "share an SQLite file; start `mlflow server` and set tracking.uri to it, or use a store of this host, or "
                "measure with tracking=journal and then `crosstrain sync` on one host"
            )

    def _close_stale(self, running: list[Run]) -> None:
        for run in running:
            tags = run.data.tags
            if tags.get("host") != host_name() or is_alive(tags.get("driver", "")):
                continue
            reason = "the driver process ended without closing this run; closed at the next start"
            uploads.log_tags(self.client, run.info.run_id, {"outcome": "interrupted", "outcome_reason": reason})
            self.client.set_terminated(run.info.run_id, "KILLED")

    # -- one run ------------------------------------------------------------------------------------------------------------
    def start(self, name: str, params: dict[str, str], tags: dict[str, str], start_ms: int) -> str:
        """Create a RUNNING run and return its id. Tags `host`, `driver` and MLflow's user and source are added."""
        with self._told():
            run = self.client.create_run(self._id(), start_ms, uploads.legal_tags({**own_tags(), **tags}), name)
            uploads.log_params(self.client, run, params)
            return run.info.run_id

    def finish(self, run_id: str, record: RunRecord, again: bool = False) -> None:
        """Upload the record and give the run its final status. May be repeated: points, params and artifacts stay single.

        `again`: also what a run that was uploaded to the end should have already.
        """
        with self._told():
            uploads.upload(self.client, run_id, record, again)

    def compare(self, run_id: str, record: RunRecord) -> Proof:
        """Count what the store has of the record."""
        with self._told():
            return proof.compare(self.client, self.client.get_run(run_id), record)

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        with self._told():
            uploads.log_tags(self.client, run_id, {key: value})

    def log_metrics(self, run_id: str, metrics: dict[str, float]) -> None:
        """Summary metrics that are known only later (speed-up). NaN and infinities are dropped."""
        with self._told():
            uploads.log_metrics(self.client, run_id, uploads.summary_metrics(metrics, int(time.time() * 1000)))

    # -- reading ------------------------------------------------------------------------------------------------------------
    def finished_keys(self, strict: bool = False) -> set[str]:
        """The `run_key` tags of the runs that need no second measurement: outcome ok, unless `strict` also the flagged ones."""
        with self._told():
            outcomes = PUBLISHED[:1] if strict else PUBLISHED
            runs = [run for outcome in outcomes for run in self._search(f"tags.outcome = '{outcome}'")]
            return {run.data.tags["run_key"] for run in runs if "run_key" in run.data.tags and run.info.status == "FINISHED"}

    def find_run(self, key: str, value: str) -> str | None:
        """The id of the newest run with this tag, None when there is none."""
        with self._told():
            runs = self._search(f"tags.`{key}` = '{value}'", at_most=1)
            return runs[0].info.run_id if runs else None

    def of_journal(self, run_id: str) -> tuple[str, bool] | None:
        """(MLflow's id, whether it was deleted) of the run with this `crosstrain_run_id`, None when the experiment has none."""
        from mlflow.entities import ViewType

        with self._told():
            query = f"tags.crosstrain_run_id = '{run_id}'"
            found = self.client.search_runs([self._id()], query, run_view_type=ViewType.ALL, max_results=10)
            # one that is not deleted before one that is
            runs = sorted((run.info.lifecycle_stage == "deleted", run.info.run_id) for run in found)
            return (runs[0][1], runs[0][0]) if runs else None

    def metrics_of(self, run_id: str) -> dict[str, float]:
        with self._told():
            return dict(self.client.get_run(run_id).data.metrics)

    def published_of_cell(self, cell_key: str) -> list[TrackedRun]:
        """The runs of one cell whose numbers were published, newest first."""
        with self._told():
            runs = self._search(f"tags.cell_key = '{cell_key}'")
            return [_tracked(run) for run in runs if run.data.tags.get("outcome") in PUBLISHED and run.info.status == "FINISHED"]

    def runs_of_sweep(self, sweep: str) -> list[TrackedRun]:
        """All runs of a sweep that are not deleted, newest first."""
        with self._told():
            return [_tracked(run) for run in self._search(f"tags.sweep = '{sweep}'")]

    def runs(self, query: str = "") -> list[TrackedRun]:
        """All runs that are not deleted (`query`: in MLflow's language), newest first."""
        with self._told():
            return [_tracked(run) for run in self._search(query)]

    def newest_sweep(self) -> str | None:
        with self._told():
            runs = self._search("tags.kind = 'run'", at_most=1)
            return runs[0].data.tags.get("sweep") if runs else None

    def accuracy_over_time(self, run_id: str) -> list[tuple[float, float, float]]:
        """(epoch, test accuracy, seconds of training until its end, evaluation left out) of each epoch."""
        with self._told():
            accuracy = {m.step: m.value for m in self.client.get_metric_history(run_id, "epoch/accuracy")}
            seconds = {m.step: m.value for m in self.client.get_metric_history(run_id, "epoch/train_s")}
        return [(step, accuracy[step], seconds[step]) for step in sorted(accuracy) if step in seconds]

    def latest_runs(self, number: int) -> list[TrackedRun]:
        with self._told():
            return [_tracked(run) for run in self._search("", at_most=number)]

    # -- for people ---------------------------------------------------------------------------------------------------------
    @property
    def ui_command(self) -> str:
        """The command that opens this store; to be typed in the start directory."""
        command = "crosstrain ui"
        if self.uri != self.default_uri:
            command += f" --uri '{checks.shown(self.uri)}'"
        if self.experiment != DEFAULT_EXPERIMENT:
            command += f" --experiment '{self.experiment}'"
        return command

    def ui_url(self, base: str = "", view: str = "table", network: str = "") -> str:
        """Link of a prepared view: "table" or "charts", of all networks or of one, best first; "": MLflow's own view.

        `base` is the server's address; empty for a team server (its own). A view that is missing is made; where that is not allowed
        the link is that of MLflow's own view.
        """
        if view:
            self._prepare_views(view_tags(network))
            known: dict[str, str] = {}
            with contextlib.suppress(Exception):
                known = self.client.get_experiment(self._id()).tags
            view = view if view_tag(view, network) in known else ""
        return page_url(base or checks.shown(self.uri), self._id(), view, network)

    @property
    def where_to_look(self) -> str:
        """What a person opens or types to see the runs: a server's link, else the command that starts the page."""
        return self.ui_url() if self.is_server else self.ui_command

    # -- inside -------------------------------------------------------------------------------------------------------------
    @property
    def client(self) -> MlflowClient:
        if self._client is None:
            from mlflow.tracking import MlflowClient

            self._client = MlflowClient(tracking_uri=self.uri)
        return self._client

    def _id(self) -> str:
        if not self.experiment_id:
            raise TrackingError("the tracking store was not opened: call preflight() or connect() first")
        return self.experiment_id

    def _search(self, query: str, at_most: int | None = None) -> list[Run]:
        """Runs of the experiment that are not deleted, newest first, all pages."""
        runs: list[Run] = []
        token = None
        while at_most is None or len(runs) < at_most:
            size = _PAGE if at_most is None else min(_PAGE, at_most - len(runs))
            page = self.client.search_runs(
                [self._id()], query, max_results=size, order_by=["attributes.start_time DESC"], page_token=token
            )
            runs += page
            token = page.token
            if not token:
                break
        return runs

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Whatever goes wrong becomes a TrackingError. After a failure a server must answer within 3 s before it is tried again."""
        if self._failed and self.is_server:
            checks.check_answers(self.uri, timeout=3)
        try:
            yield
        except Exception as error:
            self._failed = True
            raise checks.explain(error, self.uri) from error
        self._failed = False


def _tracked(run: Run) -> TrackedRun:
    info: Any = run.info
    return TrackedRun(
        info.run_id, info.run_name or "", info.status, info.start_time, info.end_time or None,
        dict(run.data.params), dict(run.data.tags), dict(run.data.metrics),
    )  # fmt: skip
