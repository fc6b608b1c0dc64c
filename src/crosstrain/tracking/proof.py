"""Does the store have all that the journal of a run has? Counted, value by value, with what the store itself says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from crosstrain.tracking import upload
from crosstrain.tracking.series import RunRecord, thin

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

#: the driver's own log, which gets lines after it was uploaded
GROWING = "train.log"


@dataclass(frozen=True)
class Proof:
    """What was compared: how many of each kind the journal has, and the names of those that the store has not, or not so."""

    wanted: dict[str, int]
    """params, metrics, series, points, tags, artifacts, facts (name, status, start, end)"""
    missing: dict[str, list[str]]
    """of the same kinds; for points one entry for each that lacks"""

    @property
    def whole(self) -> bool:
        return not any(self.missing.values())

    def words(self) -> str:
        """`31/31 params, 24/24 metrics, …`: those in the store of those in the journal."""
        kinds = [kind for kind in self.wanted if kind != "facts"]
        return ", ".join(f"{self.wanted[kind] - len(self.missing[kind])}/{self.wanted[kind]} {kind}" for kind in kinds)

    def lacks(self) -> str:
        """Names of some that are missing, of every kind."""
        return "; ".join(f"{kind} {', '.join(names[:3])}" for kind, names in self.missing.items() if names and kind != "points")


def compare(client: MlflowClient, run: Run, record: RunRecord) -> Proof:
    """Ask the store for everything of the record. Raises what MLflow raises."""
    data, run_id = run.data, run.info.run_id
    params = {upload.legal_key(key): str(value)[: upload.PARAM_LENGTH] for key, value in record.params.items()}
    metrics = {metric.key: metric.value for metric in upload.summary_metrics(record.metrics, record.end_ms)}
    tags = upload.legal_tags(record.tags)
    wanted: dict[str, int] = {"params": len(params), "metrics": len(metrics)}
    missing = {
        # a param that changed after the run was begun is told by a tag
        "params": [k for k, v in params.items() if v not in (data.params.get(k), data.tags.get(upload.legal_key(f"param_now.{k}")))],
        "metrics": [key for key, value in metrics.items() if data.metrics.get(key) != value],
    }
    thinned = {key: points for name, series in record.series.items() for key, points in thin(upload.legal_key(name), series).items()}
    wanted |= {"series": len(thinned), "points": sum(len(points.steps) for points in thinned.values())}
    missing |= {"series": [], "points": []}
    for key, points in thinned.items():
        stored = {(metric.step, metric.timestamp, metric.value) for metric in client.get_metric_history(run_id, key)}
        own = set(zip(points.steps.tolist(), points.times_ms.tolist(), points.values.tolist(), strict=True))
        missing["points"] += [key] * len(own - stored)
        missing["series"] += [key] * bool(own ^ stored)
    wanted |= {"tags": len(tags), "artifacts": len(record.artifacts)}
    missing["tags"] = [key for key, value in tags.items() if data.tags.get(key) != value]
    missing["artifacts"] = _artifacts(client, run_id, record.artifacts)
    facts = {
        "name": (run.info.run_name, record.name),
        "status": (run.info.status, record.status),
        "start": (run.info.start_time, record.start_ms),
        "end": (run.info.end_time, record.end_ms),
    }
    wanted["facts"] = len(facts)
    missing["facts"] = [f"{name} {there} instead of {here}" for name, (there, here) in facts.items() if there != here]
    return Proof(wanted, missing)


def _artifacts(client: MlflowClient, run_id: str, artifacts: Iterable[tuple[Path, str]]) -> list[str]:
    """Those that are not in the store with the size of the file here (a file that is gone here is taken as it is there)."""
    artifacts = list(artifacts)
    sizes: dict[str, int] = {}
    for folder in {folder for _, folder in artifacts}:
        sizes |= {file.path: file.file_size or 0 for file in client.list_artifacts(run_id, folder or None) if not file.is_dir}
    lacking = []
    for path, folder in artifacts:
        name = f"{folder}/{path.name}" if folder else path.name
        size = path.stat().st_size if path.is_file() else sizes.get(name)
        grown = path.name == GROWING and 0 < sizes.get(name, 0) <= (size or 0)
        if name not in sizes or (sizes[name] != size and not grown):
            lacking.append(name)
    return lacking
