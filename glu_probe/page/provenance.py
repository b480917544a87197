"""Provenance as a page shows it: pages are handed on, and say nothing of the directories of the machine that made them."""

from __future__ import annotations

import re
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

# A path from the root, from home or from a drive, where a word may begin: what stands behind "://" or in a relative path is none.
_ROOTED = re.compile(r"""(?:^|(?<=[\s"'`=(]))(?:~?/|[A-Za-z]:[\\/])[^\s"'`,;()]*""")


def without_places(value: Any) -> Any:
    """The same with the last part alone of every path from the root; addresses and names of repositories stay.

    A string that is a path as a whole may hold spaces; within a sentence or a command a path ends at one.

    >>> without_places({"ref": "/home/me/my models/a.gguf", "command": ["plot", "~/out"], "of": ["org/name", "https://h/a/b"]})
    {'ref': 'a.gguf', 'command': ['plot', 'out'], 'of': ['org/name', 'https://h/a/b']}
    """
    if isinstance(value, dict):
        return {name: without_places(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_places(one) for one in value]
    if not isinstance(value, str):
        return value
    if re.match(r"[A-Za-z]:[\\/]", value):
        return PureWindowsPath(value).name
    if re.match(r"~?/", value) and ": " not in value:
        return PurePosixPath(value).name
    return _ROOTED.sub(lambda found: _last(found[0]), value)


def _last(path: str) -> str:
    """The last part; what ends a sentence stays behind it."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] or path
