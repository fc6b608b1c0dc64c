"""Official files: found on this machine or downloaded, and never used before their checksum is right.

Looked for in this order: `data_dir` (<data_dir>/<name>/ and <data_dir>/), folders where a distribution's package puts them, the
cache, the official address. CROSSTRAIN_DATA_MIRROR=<base address> replaces the official addresses by <base>/<name>/<file>. Proxies
come from the usual environment variables.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from crosstrain.data.cache import locked, require_disk
from crosstrain.errors import OutcomeError
from crosstrain.paths import cache_dir

TIMEOUT_S = 30.0  # without a byte
TRIES = 3  # per address; a try goes on where the last one was cut off
REPORT_S = 2.0
BLOCK = 1 << 18

Report = Callable[[str], None]


@dataclass(frozen=True)
class File:
    """An official file: its size in bytes, its SHA-256 and, for .gz, that of its unpacked content (repacked copies are as good)."""

    name: str
    size: int
    sha256: str
    content_sha256: str = ""


@dataclass(frozen=True)
class Source:
    """Where a data set's official files are. addresses: folders, the official one first. folders: of distributions' packages."""

    name: str
    addresses: tuple[str, ...]
    files: tuple[File, ...]
    folders: tuple[Path, ...] = ()
    hint: str = ""

    @property
    def version(self) -> str:
        """Short hash of the files' checksums: part of the data set's key."""
        return hashlib.sha256(" ".join(file.sha256 for file in self.files).encode()).hexdigest()[:12]


class _Failed(Exception):
    """This address does not give the file, in words."""


def obtain(source: Source, data_dir: Path | None, report: Report) -> dict[str, Path]:
    """{file name: path} of the source's files, all checked. Raises OutcomeError `data_missing` with what the user can do."""
    if data_dir is not None and not data_dir.expanduser().is_dir():
        raise OutcomeError("data_missing", f"data_dir={data_dir} is no folder", "name an existing folder, or data_dir=null")
    folders = [data_dir.expanduser() / source.name, data_dir.expanduser()] if data_dir else []
    store = cache_dir("data", "downloads", source.name)
    with locked(store.with_suffix(".lock"), report):
        return {file.name: _obtain_one(source, file, [*folders, *source.folders], store, report) for file in source.files}


def _obtain_one(source: Source, file: File, folders: list[Path], store: Path, report: Report) -> Path:
    notes = []
    for folder in folders:
        path = folder / file.name
        if path.is_file():
            wrong = fault(path, file)
            if not wrong:
                return path
            notes.append(wrong)
            report(f"{source.name}: not used: {wrong}")
    kept = store / file.name
    if kept.is_file():
        if not fault(kept, file):
            return kept
        kept.unlink()
    require_disk(store, file.size, f"{source.name}: {file.name}")
    mirror = os.environ.get("CROSSTRAIN_DATA_MIRROR")
    for base in (f"{mirror.rstrip('/')}/{source.name}",) if mirror else source.addresses:
        try:
            return _download(f"{base}/{file.name}", file, kept, source.name, report)
        except _Failed as error:
            notes.append(str(error))
    names = ", ".join(entry.name for entry in source.files)
    hint = f"put {names} (from {source.addresses[0]}/) into a folder DIR/{source.name} and give data_dir=DIR"
    raise OutcomeError(
        "data_missing",
        f"{source.name}: {file.name} is not on this machine and was not downloaded: {'; '.join(notes)}",
        f"{hint}; {source.hint}" if source.hint else hint,
    )


def fault(path: Path, file: File) -> str:
    """What is wrong with the file at `path`, in one line with its path and checksums; empty when it is right."""
    found = _sha256(path)
    if found == file.sha256 or (file.content_sha256 and _content_sha256(path) == file.content_sha256):
        return ""
    size = path.stat().st_size
    what = "truncated" if size < file.size else "wrong"
    return f"{path} is {what}: {size:,} bytes of {file.size:,}, SHA-256 {found}, expected {file.sha256}"


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _content_sha256(path: Path) -> str:
    try:
        with gzip.open(path) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except (OSError, EOFError, zlib.error):
        return ""


def _download(url: str, file: File, final: Path, name: str, report: Report) -> Path:
    """Download to `<final>.part`, check, rename. Raises _Failed."""
    part = final.with_name(final.name + ".part")
    report(f"{name}: downloading {file.name} ({file.size / 1e6:,.1f} MB) from {url}")
    cut = "the connection ended"
    for attempt in range(TRIES):
        try:
            _receive(url, file, part, name, report)
        except urllib.error.HTTPError as error:
            raise _Failed(f"{url}: HTTP {error.code} {error.reason}") from error
        except (urllib.error.URLError, ValueError) as error:  # no connection; no address
            raise _Failed(f"{url}: {getattr(error, 'reason', error)}") from error
        except (OSError, http.client.HTTPException) as error:  # in the middle of the file
            cut = str(error)
        size = _size(part)
        if size < file.size:
            continue
        wrong = fault(part, file)
        if not wrong:
            part.replace(final)
            return final
        part.unlink()
        # What an earlier run had left may have spoilt it: then once more from the start.
        if attempt == TRIES - 1 or size > file.size:
            raise _Failed(f"{url}: {wrong}")
    raise _Failed(f"{url}: {cut} after {_size(part):,} of {file.size:,} bytes, {TRIES} times (the next run goes on from there)")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _receive(url: str, file: File, part: Path, name: str, report: Report) -> None:
    """Append what the server sends to `part`, from where it ends if the server can do that; stops where the connection does."""
    done = _size(part)
    if done >= file.size:
        done = 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        if response.status != 206:
            done = 0
        told = time.monotonic()
        with part.open("ab" if done else "wb") as stream:
            while done <= file.size and (block := response.read(BLOCK)):
                stream.write(block)
                done += len(block)
                if time.monotonic() - told >= REPORT_S:
                    told = time.monotonic()
                    report(f"{name}: {done / 1e6:,.1f} of {file.size / 1e6:,.1f} MB ({100 * done // file.size} %)")
