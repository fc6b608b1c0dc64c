"""Shared libraries of this machine that an environment links to: the `# link:` lines of a lock.

Some wheels look inside their own folder for a library that the system has under another name.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from crosstrain.errors import OutcomeError
from crosstrain.locks import Lock


def find(name: str) -> Path | None:
    """Where the dynamic loader finds the library `name` (libmpi.so.40): LD_LIBRARY_PATH, then its cache. None where it does not."""
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and Path(folder, name).is_file():
            return Path(folder, name).absolute()
    try:
        # by its path: /sbin is not on every user's PATH
        cache = subprocess.run(["/sbin/ldconfig", "-p"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(rf"^\s*{re.escape(name)} \(.*\) => (.+)$", cache, re.MULTILINE)
    return Path(found[1]) if found and Path(found[1]).is_file() else None


def find_all(lock: Lock) -> dict[str, str]:
    """{link below site-packages: path of the system's library}. Raises OutcomeError (env_missing) where a library is missing."""
    found = {link: find(library) for link, library in lock.links}
    missing = sorted({library for link, library in lock.links if found[link] is None})
    if missing:
        message = f"{lock.framework} needs {' and '.join(missing)}, which this system does not have"
        raise OutcomeError("env_missing", message, f"apt-get install {lock.headers['apt']}")
    return {link: str(path) for link, path in found.items()}


def make_links(folder: Path, libraries: Mapping[str, str]) -> None:
    """Make the links of `find_all` in the environment `folder`."""
    (packages,) = folder.glob("lib/python*/site-packages")
    for link, library in libraries.items():
        (packages / link).symlink_to(library)
