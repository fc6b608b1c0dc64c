"""pip's settings for uv, which ignores them: a company's mirror or a local wheel folder keeps working.

pip reads, later ones winning: its configuration files (global, the user's, the environment's, $PIP_CONFIG_FILE), of these the
section [global] and then [install], and last the variables PIP_*. The files are read here directly, since the driver's own
environment may have no pip to ask.
"""

from __future__ import annotations

import configparser
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from crosstrain.errors import OutcomeError

#: pip's setting -> uv's variable, what separates its values, and the user's variables that make ours unnecessary
_VARIABLES: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("find-links", "UV_FIND_LINKS", ",", ()),
    ("index-url", "UV_DEFAULT_INDEX", " ", ("UV_INDEX_URL",)),
    ("extra-index-url", "UV_INDEX", " ", ("UV_EXTRA_INDEX_URL",)),
    ("trusted-host", "UV_INSECURE_HOST", " ", ()),
    ("constraint", "UV_CONSTRAINT", " ", ()),
    ("cert", "SSL_CERT_FILE", " ", ("UV_NATIVE_TLS", "UV_SYSTEM_CERTS")),
    ("client-cert", "SSL_CLIENT_CERT", " ", ()),
    ("timeout", "UV_HTTP_TIMEOUT", " ", ()),
    ("proxy", "HTTPS_PROXY", " ", ("https_proxy", "ALL_PROXY", "all_proxy")),
    ("proxy", "HTTP_PROXY", " ", ("http_proxy", "ALL_PROXY", "all_proxy")),
)
#: the user's own uv variables that name an index: with one of them, pip's no-index is not passed on
_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL")
#: of the surrounding shell, what would point uv or a new interpreter somewhere else
_DROPPED = ("UV_PYTHON", "UV_SYSTEM_PYTHON", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")


def _files(environ: Mapping[str, str]) -> list[Path]:
    """pip's configuration files, the weakest first (Linux, as in pip's documentation, "Configuration")."""
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    home = Path(environ.get("HOME") or Path.home())
    folders = [Path(one) for one in (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep) if one]
    files = [folder / "pip" / "pip.conf" for folder in folders]
    files += [Path("/etc/pip.conf"), home / ".pip" / "pip.conf"]
    files += [Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"]
    files += [Path(sys.prefix) / "pip.conf"]
    return files + ([Path(named)] if named else [])


def read_pip_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """{"find-links": "/wheels", …}: what `pip install` would use. Raises OutcomeError for a file that is no configuration."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}}
    for path in _files(environ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path)
        except (configparser.Error, UnicodeDecodeError, OSError) as error:
            reason = " ".join(str(error).split())
            raise OutcomeError("env_missing", f"pip's configuration {path} can not be read: {reason}") from error
        for section, values in sections.items():
            if parser.has_section(section):
                values.update({key.lower().replace("_", "-"): value for key, value in parser.items(section)})
    variables = {
        name.removeprefix("PIP_").lower().replace("_", "-"): value for name, value in environ.items() if name.startswith("PIP_")
    }
    settings: dict[str, str] = {}
    for values in (sections["global"], sections["install"], variables):
        settings.update({key: value for key, value in values.items() if value})  # pip, too, passes over empty values
    if "default-timeout" in settings:  # the two names pip has for one option
        settings.setdefault("timeout", settings["default-timeout"])
    return settings


def uv_settings(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The whole environment for uv, and the options for `uv pip install`, with pip's settings translated.

    Variables that uv knows and the user has set win over pip's settings. Proxies pass through as they are.
    """
    pip = read_pip_settings(environ)
    result = {name: value for name, value in environ.items() if name not in _DROPPED}
    result.update({"NO_COLOR": "1", "UV_NO_PROGRESS": "1"})
    options: list[str] = []
    if pip.get("no-index", "").lower() in ("1", "true", "yes", "y", "on", "t"):
        if not any(environ.get(name) for name in _INDEX_VARIABLES):
            options.append("--no-index")
        pip.pop("index-url", None)
        pip.pop("extra-index-url", None)
    for key, variable, separator, instead in _VARIABLES:
        values = [os.path.expanduser(one) if one.startswith("~") else one for one in pip.get(key, "").split()]
        if values and not any(environ.get(name) for name in (variable, *instead)):
            result[variable] = separator.join(values)
            if variable == "UV_INDEX":
                # pip takes the best version of all indexes; uv alone would stop at the first that knows the name.
                result.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    if pip.get("keyring-provider") == "subprocess":
        result.setdefault("UV_KEYRING_PROVIDER", "subprocess")
    return result, options


def pip_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """PIP_… variables that send a pip which uv runs to the same places as uv.

    Such a pip reads no pip.conf of the driver's environment and none of uv's variables, so both are told here.
    """
    pip = read_pip_settings(environ)
    keys = dict.fromkeys([key for key, *_ in _VARIABLES] + ["no-index", "keyring-provider"])
    result = {f"PIP_{key.upper().replace('-', '_')}": " ".join(pip[key].split()) for key in keys if key in pip}
    for variable, names in (
        ("PIP_INDEX_URL", ("UV_DEFAULT_INDEX", "UV_INDEX_URL")),
        ("PIP_EXTRA_INDEX_URL", ("UV_INDEX", "UV_EXTRA_INDEX_URL")),
        ("PIP_FIND_LINKS", ("UV_FIND_LINKS",)),
    ):
        values = " ".join(environ.get(name, "") for name in names).replace(",", " ").split()
        if values:
            result[variable] = " ".join(re.sub(r"^[\w-]+=(?=\w+:)", "", one) for one in values)  # UV_INDEX may give names: mine=https://…
            if variable != "PIP_FIND_LINKS":
                result["PIP_NO_INDEX"] = "0"
    return result
