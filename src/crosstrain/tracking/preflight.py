"""Can this tracking store be used? Every answer "no" is a TrackingError of one line: why, and how to fix it."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import re
import socket
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import psutil

from crosstrain.errors import TrackingError

#: s, for one answer of a server; two tries and the pause between them stay below DEADLINE_S.
ANSWER_S = 5
#: MLflow's first major version whose server answers what the client of today asks for with every run (logged models)
OLDEST_SERVER = 3
#: s, within which a store must be found good or bad. Creating a new local store may take longer.
DEADLINE_S = 15
#: s, to wait for another driver that is creating the same local store (measured: 4 to 12 s on a busy machine).
LOCK_S = 120
#: File systems that several hosts can mount, where SQLite's locks can not be trusted between hosts.
NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "sshfs"}
#: The database drivers SQLAlchemy asks for, and what to install for them.
_DATABASE_DRIVERS = {
    "psycopg": "psycopg[binary]",
    "psycopg2": "psycopg2-binary",
    "MySQLdb": "mysqlclient",
    "pymysql": "pymysql",
    "pyodbc": "pyodbc",
}

_RESTORE = "move it away and start again, or restore a backup"

T = TypeVar("T")


def prepare_environment() -> None:
    """Settings for MLflow that must precede its import; what the user has set stays."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # MLflow logs every database error with its traceback before it raises it; ours are one line.
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    # A dead server hangs MLflow's own defaults (7 retries, 120 s) for minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """MLflow's HTTP settings for the preflight, whatever the user has set: one retry, ANSWER_S a request."""
    settings = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": str(ANSWER_S)}
    before = {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def within(seconds: float, action: Callable[[], T], store: str) -> T:
    """The result of `action`, or TrackingError when it takes longer. It then goes on in a daemon thread, which dies with us."""
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.extend((True, action()))
        except BaseException as error:
            outcome.extend((False, error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TrackingError(f"tracking store {store}: no answer within {seconds:g} s (time-out): is it overloaded?")
    if not outcome[0]:
        raise outcome[1]
    return outcome[1]


def shown(uri: str) -> str:
    """The URI without its password, for messages."""
    return re.sub(r"(://[^/:@]*):[^/@]*@", r"\1:***@", uri)


def explain(error: BaseException, uri: str) -> TrackingError:
    """A TrackingError for anything that MLflow or SQLAlchemy raised."""
    if isinstance(error, TrackingError):
        return error
    text = re.sub(r"\(Background on this error at: \S+\)", "", " ".join(str(error).split())).strip()
    place = f"tracking store {shown(uri)}"
    if isinstance(error, ModuleNotFoundError) and error.name in _DATABASE_DRIVERS:
        package = _DATABASE_DRIVERS[error.name]
        other = ", or write postgresql+psycopg2:// when psycopg2 is installed" if error.name == "psycopg" else ""
        return TrackingError(f"{place} needs the module {error.name}: pip install '{package}'{other}")
    if "out-of-date database schema" in text or "Can't locate revision" in text:
        return _old_schema(uri)
    if getattr(error, "error_code", "") == "PERMISSION_DENIED":
        return TrackingError(f"{place} denies access (403): the login may not write there; its admin gives EDIT on the experiment")
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return TrackingError(
            f"{place}: its TLS certificate is not trusted here; set MLFLOW_TRACKING_SERVER_CERT_PATH to the CA file"
        )
    return TrackingError(f"{place}: {text[:300]}")


def _old_schema(uri: str) -> TrackingError:
    return TrackingError(
        f"tracking store {shown(uri)} has the database schema of another MLflow version: make a backup, then run "
        f"`mlflow db upgrade {shown(uri)}` (or install the MLflow that made it)"
    )


# -- servers ------------------------------------------------------------------------------------------------------------------
def check_answers(uri: str, timeout: float = ANSWER_S) -> None:
    """Does anything answer HTTP there? Raises TrackingError naming what went wrong; needs no MLflow and no login."""
    place = f"tracking server {shown(uri)}"
    host = urlsplit(uri).hostname
    if not host:
        raise TrackingError(f"tracking.uri={shown(uri)} names no host: write http://host:port")
    # Credentials inside the address are MLflow's business; here they would only be taken for a port.
    bare = re.sub(r"://[^/@]*@", "://", uri.rstrip("/"))
    try:
        with urllib.request.urlopen(f"{bare}/health", timeout=timeout):
            return
    except urllib.error.HTTPError:
        return
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, socket.gaierror):
            raise TrackingError(f"{place}: the host name {host} is unknown: check tracking.uri or MLFLOW_TRACKING_URI") from None
        if isinstance(reason, ConnectionRefusedError):
            raise TrackingError(f"{place}: connection refused: is the server running, is the port right?") from None
        if isinstance(reason, TimeoutError):
            raise TrackingError(
                f"{place}: no answer within {timeout:g} s (time-out): is it overloaded, or is a firewall or proxy in between?"
            ) from None
        if "CERTIFICATE_VERIFY_FAILED" in str(reason):
            return  # MLflow may know the certificate; its own request decides
        raise TrackingError(f"{place} can not be reached: {reason}") from None
    except http.client.HTTPException as error:
        text = " ".join(str(error).split())[:100]
        raise TrackingError(f"{place} is no MLflow server: what answers there is not HTTP ({text})") from None


def check_server(uri: str) -> None:
    """One authorised request to the MLflow API, with MLflow's own credentials. Raises TrackingError."""
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    api = "/api/2.0/mlflow/experiments/search"
    answer = http_request(
        get_default_host_creds(uri), api, "GET", params={"max_results": 1},
        max_retries=1, timeout=ANSWER_S, raise_on_status=False,
    )  # fmt: skip
    place = f"tracking server {shown(uri)}"
    status, body = answer.status_code, " ".join(answer.text.split())[:200]
    if status == 401:
        variables = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        if any(os.environ.get(f"MLFLOW_TRACKING_{name}") for name in ("USERNAME", "TOKEN")) or "@" in urlsplit(uri).netloc:
            raise TrackingError(f"{place} does not accept the login given to it (401): check {variables}")
        raise TrackingError(f"{place} wants a login (401): set {variables}")
    if status == 403 and "Invalid Host header" in body:
        host = urlsplit(uri).netloc.rpartition("@")[2]
        raise TrackingError(
            f"{place} does not accept the name {host} (403 Invalid Host header): "
            f"start it with `mlflow server --allowed-hosts {host}`"
        )
    if status == 403:
        raise TrackingError(f"{place} denies access (403): the login in MLFLOW_TRACKING_USERNAME or _TOKEN lacks the permission")
    if status == 404:
        raise TrackingError(f"{place} answers, but is no MLflow server (404 at {api}): check the address and its path prefix")
    if status != 200:
        raise TrackingError(f"{place} fails (HTTP {status} at {api}): look into the server's log. It said: {body or 'nothing'}")
    try:
        json.loads(answer.text)
    except ValueError:
        raise TrackingError(
            f"{place} answers, but is no MLflow server (no JSON at {api}): check the address; a proxy's login page looks like this"
        ) from None
    answer = http_request(
        get_default_host_creds(uri), "/version", "GET", max_retries=1, timeout=ANSWER_S, raise_on_status=False
    )  # fmt: skip
    version = re.fullmatch(r"(\d+)\.\d+\S*", answer.text.strip()) if answer.status_code == 200 else None
    if version and int(version[1]) < OLDEST_SERVER:
        raise TrackingError(
            f"{place} is MLflow {version[0]}, which does not know what this MLflow asks of a run: update it to {OLDEST_SERVER}.0 or newer"
        )


# -- databases ------------------------------------------------------------------------------------------------------------------
def check_database(uri: str) -> None:
    """Is there a driver for this SQLAlchemy URI, does the host answer, may we log in? Raises what `explain` explains."""
    import sqlalchemy

    url = sqlalchemy.make_url(uri)
    engine = sqlalchemy.create_engine(url)
    place = f"tracking store {shown(uri)}"
    port = url.port or {"postgresql": 5432, "mysql": 3306, "mssql": 1433}.get(url.get_backend_name(), 0)
    if url.host and port:
        try:
            socket.create_connection((url.host, port), timeout=ANSWER_S).close()
        except socket.gaierror:
            raise TrackingError(f"{place}: the host name {url.host} is unknown") from None
        except TimeoutError:
            raise TrackingError(f"{place}: no answer from {url.host}:{port} within {ANSWER_S} s (time-out)") from None
        except OSError as error:
            raise TrackingError(f"{place}: {url.host}:{port}: {error.strerror or error}: is the database running?") from None
    try:
        with engine.connect():
            pass
    finally:
        engine.dispose()


def file_store_error(uri: str, default_uri: str) -> TrackingError:
    """The line for a file store (`./mlruns` with meta.yaml files), which MLflow refuses since 3.13."""
    folder = unquote(urlsplit(uri).path) if uri.startswith("file:") else uri
    if folder.endswith(".db"):
        return TrackingError(f"tracking.uri={uri} is a path: write sqlite:///{folder}")
    return TrackingError(
        f"tracking.uri={uri} is a file store, which MLflow no longer supports: move it with "
        f"`mlflow migrate-filestore --source {folder} --target {default_uri}` and use that URI, or leave tracking.uri out"
    )


def sqlite_path(uri: str) -> Path:
    """The database file of an absolute `sqlite:////…` URI (driver suffix and query allowed)."""
    return Path(uri.partition("///")[2].partition("?")[0])


@contextlib.contextmanager
def locked(database: Path, uri: str) -> Iterator[None]:
    """Hold `<database>.lock`: one driver at a time creates or checks the store. The system drops the lock of a killed one."""
    try:
        lock = Path(f"{database}.lock").open("a")  # noqa: SIM115
    except OSError as error:
        raise TrackingError(
            f"tracking store {shown(uri)}: {database.parent} can not be written ({error.strerror}): "
            "choose another place by tracking.uri"
        ) from None
    with lock:
        end = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TrackingError(f"tracking store {shown(uri)}: another driver holds {lock.name} since {LOCK_S} s") from None
                time.sleep(0.1)
        yield


def create_sqlite(database: Path, artifacts: str) -> None:
    """Make a new MLflow database. Made beside and renamed, so that a kill in the middle leaves no half schema. Call it locked."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    new = database.with_name(f"{database.name}.{os.getpid()}.new")
    new.unlink(missing_ok=True)
    try:
        store = SqlAlchemyStore(f"sqlite:///{new}", artifacts)
        store._dispose_engine()
        os.replace(new, database)
    finally:
        new.unlink(missing_ok=True)


def check_sqlite(database: Path, uri: str) -> None:
    """Is the existing file a writable MLflow database of this MLflow's schema? Raises TrackingError."""
    from mlflow.store.db.utils import _get_latest_schema_revision

    place = f"tracking store {shown(uri)}"
    try:
        with database.open("rb") as file:
            magic = file.read(16)
    except OSError as error:
        raise TrackingError(f"{place} can not be read: {error.strerror}: {database}") from None
    if magic != b"SQLite format 3\0":
        raise TrackingError(f"{place} is corrupt: {database} is no SQLite database; {_RESTORE}")
    try:
        with contextlib.closing(sqlite3.connect(database, timeout=2 * ANSWER_S, isolation_level=None)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            versioned = "alembic_version" in tables
            revisions = connection.execute("SELECT version_num FROM alembic_version").fetchall() if versioned else []
            connection.execute("BEGIN IMMEDIATE")  # needs the write lock, as every upload will
            connection.execute("ROLLBACK")
    except sqlite3.DatabaseError as error:
        hint = {
            "database is locked": "another process keeps it locked; end that process",
            "attempt to write a readonly database": "make the file and its folder writable, or set tracking.uri",
        }.get(str(error), f"the file may be corrupt; {_RESTORE}")
        raise TrackingError(f"{place} can not be used: {error}: {hint}") from None
    if tables and "experiments" not in tables:
        raise TrackingError(f"{place} is the database of another program, not MLflow's: choose another file by tracking.uri")
    if revisions != [(_get_latest_schema_revision(),)]:
        raise _old_schema(uri)


def file_system(path: Path) -> str:
    """The type of the file system that holds the path, such as ext4 or nfs4; '' when unknown."""
    path = path.resolve()
    mounts = [p for p in psutil.disk_partitions(all=True) if path.is_relative_to(p.mountpoint)]
    return max(mounts, key=lambda p: len(p.mountpoint)).fstype.removeprefix("fuse.") if mounts else ""
