"""Where things live: the user cache, the configuration tree, the locks, the worker."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_REPOSITORY = _PACKAGE.parents[1]


def cache_dir(*parts: str) -> Path:
    """The user cache ($CROSSTRAIN_CACHE, else $XDG_CACHE_HOME/crosstrain, else ~/.cache/crosstrain) plus `parts`, created."""
    root = os.environ.get("CROSSTRAIN_CACHE")
    if not root:
        root = str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "crosstrain")
    path = Path(root).expanduser().absolute().joinpath(*parts)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _shipped(in_repository: str, in_package: str) -> Path:
    """A data folder: beside the sources in a checkout, inside the package once installed as a wheel."""
    checkout = _REPOSITORY / in_repository
    return checkout if checkout.is_dir() else _PACKAGE / in_package


def conf_dir() -> Path:
    """The Hydra configuration tree (conf/)."""
    return _shipped("conf", "conf")


def locks_dir() -> Path:
    """The frameworks' locks (environments/)."""
    return _shipped("environments", "environments_locks")


def worker_dir() -> Path:
    """The folder src/crosstrain_worker, which is what a framework's interpreter is started on."""
    import crosstrain_worker

    return Path(crosstrain_worker.__file__).resolve().parent
