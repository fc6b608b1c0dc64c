"""What `crosstrain doctor` measured on a device, kept in the user cache: what utilization_pct of later runs refers to.

Keyed by the device's model and the driver. The form is that of docs/design.md (Ceilings).
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from crosstrain import devices, paths
from crosstrain.prepare import Place

SCHEMA = 1


def _path(kind: str, device_name: str) -> Path:
    driver = devices.describe_machine().get("nvidia_driver", "") if kind == "gpu" else ""
    key = hashlib.sha256(json.dumps([SCHEMA, kind, device_name, driver]).encode()).hexdigest()[:8]
    return paths.cache_dir("ceilings") / f"{re.sub(r'[^A-Za-z0-9]+', '-', device_name)}-{key}.json"


def save(kind: str, device_name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Keep what was measured; of numbers that were not measured now, those from before stay. Returns all of it."""
    known = load(kind, device_name) or {}
    made = {"schema": SCHEMA, "device": device_name, "measured": datetime.datetime.now().astimezone().isoformat(timespec="seconds")}
    whole = {**known, **found, **made}
    path = _path(kind, device_name)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(whole, indent=1) + "\n")
    temporary.replace(path)
    return whole


def load(kind: str, device_name: str) -> dict[str, Any] | None:
    """What is known of this device with this driver, None when nothing is."""
    try:
        found = json.loads(_path(kind, device_name).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def peak_tflops(place: Place, precision: str) -> float | None:
    """The measured matrix rate of all that a run uses, None where it is not known.

    GPUs: that of one times their number. CPU: that with as many threads as the run has in all, if it was measured with so many.
    """
    known = load(place.kind, place.device_name)
    if known is None:
        return None
    rates = known.get("matrix_tflops", {}).get(precision, {})
    if place.kind == "gpu":
        return rates["1"] * place.copies if "1" in rates else None
    return rates.get(str(place.threads * place.copies)) if place.nodes == 1 else None
