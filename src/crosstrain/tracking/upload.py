"""From a RunRecord to MLflow's calls, within MLflow's limits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from crosstrain.tracking.series import RunRecord, thin

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run
    from mlflow.tracking import MlflowClient

# MLflow's limits: mlflow/utils/validation.py
METRICS_PER_CALL = 1000
PARAMS_PER_CALL = 100
TAGS_PER_CALL = 100
KEY_LENGTH = 250
PARAM_LENGTH = 6000
TAG_LENGTH = 8000

ARTIFACTS_AT_ONCE = 4

#: tag of a run that was uploaded to the end
COMPLETE = {"tracked": "complete"}

T = TypeVar("T")


def batches(items: list[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def legal_key(key: str) -> str:
    """The key with what MLflow refuses replaced by '_' and cut: allowed are letters, digits, `_ - . space : /`."""
    return re.sub(r"[^\w\-. :/]", "_", key, flags=re.ASCII)[:KEY_LENGTH]


def legal_tags(tags: dict[str, Any]) -> dict[str, str]:
    return {legal_key(key): str(value)[:TAG_LENGTH] for key, value in tags.items()}


def log_params(client: MlflowClient, run: Run, params: dict[str, Any]) -> dict[str, str]:
    """Log the params that the run does not have yet. Returns the tags that say which had another value: params never change."""
    from mlflow.entities import Param

    wanted = {legal_key(key): str(value)[:PARAM_LENGTH] for key, value in params.items()}
    new = [Param(key, value) for key, value in wanted.items() if key not in run.data.params]
    for batch in batches(new, PARAMS_PER_CALL):
        client.log_batch(run.info.run_id, params=batch)
    changed = {key: value for key, value in wanted.items() if run.data.params.get(key, value) != value}
    return {f"param_now.{key}": value for key, value in changed.items()}


def log_tags(client: MlflowClient, run_id: str, tags: dict[str, Any]) -> None:
    from mlflow.entities import RunTag

    wanted = [RunTag(key, value) for key, value in legal_tags(tags).items()]
    for batch in batches(wanted, TAGS_PER_CALL):
        client.log_batch(run_id, tags=batch)


def log_metrics(client: MlflowClient, run_id: str, metrics: list[Metric]) -> None:
    for batch in batches(metrics, METRICS_PER_CALL):
        client.log_batch(run_id, metrics=batch)


def summary_metrics(metrics: dict[str, float], time_ms: int) -> list[Metric]:
    """NaN and infinities are dropped: MLflow reads inf back as 1.8e308 and NaN empties its charts. The outcome says it."""
    from mlflow.entities import Metric

    return [
        Metric(legal_key(key), float(value), time_ms, 0)
        for key, value in metrics.items()
        if value is not None and math.isfinite(value)
    ]


def series_metrics(record: RunRecord) -> list[Metric]:
    """The thinned series, without what is not finite."""
    from mlflow.entities import Metric

    return [
        Metric(key, value, time_ms, step)
        for name, series in record.series.items()
        for key, points in thin(legal_key(name), series).items()
        for step, value, time_ms in zip(points.steps.tolist(), points.values.tolist(), points.times_ms.tolist(), strict=True)
    ]


def log_artifacts(client: MlflowClient, run_id: str, files: list[tuple[Path, str]]) -> None:
    """Several at a time, each of them waits for a server; the first one alone, because it asks once for all where they belong."""

    def send(file: tuple[Path, str]) -> None:
        client.log_artifact(run_id, str(file[0]), file[1] or None)

    for file in files[:1]:
        send(file)
    with ThreadPoolExecutor(ARTIFACTS_AT_ONCE) as pool:
        for _ in pool.map(send, files[1:]):
            pass


def upload(client: MlflowClient, run_id: str, record: RunRecord, again: bool = False) -> None:
    """Everything of the record, then the final status. A second call for a run that arrived only sets the tags, unless `again`.

    The order makes an upload that broke off harmless: the tags with the outcome come after the numbers, and the status
    last. When it is repeated, times and steps are those of the record, so that the store knows the same points again.
    Missing artifact files do not keep the run from its end; FileNotFoundError is raised after it.
    """
    run = client.get_run(run_id)
    arrived = not again and COMPLETE.items() <= run.data.tags.items() and run.info.end_time == record.end_ms
    missing = []
    tags: dict[str, str] = {}
    if not arrived:
        tags = log_params(client, run, record.params)
        log_metrics(client, run_id, summary_metrics(record.metrics, record.end_ms) + series_metrics(record))
        missing = [str(path) for path, _ in record.artifacts if not path.is_file()]
        log_artifacts(client, run_id, [(path, folder) for path, folder in record.artifacts if path.is_file()])
        tags |= COMPLETE if not missing else {}
    # A run that was taken for dead in between carries that reason.
    stale = {"outcome_reason": ""} if "outcome_reason" in run.data.tags else {}
    log_tags(client, run_id, {**tags, **stale, **record.tags})
    client.set_terminated(run_id, record.status, record.end_ms)
    if missing:
        raise FileNotFoundError(f"not a file, so no artifact: {', '.join(missing)}")
