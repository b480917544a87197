"""The libraries that own a scheme and unpack it: optional, and loaded only when a weight of theirs is read."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator
from types import ModuleType

from ...errors import MissingLibrary


def compressed_tensors(name: str, module: str) -> ModuleType:
    """A module of compressed-tensors, to read the named weight with."""
    return _load(name, "compressed-tensors", f"compressed_tensors.{module}")


def bitsandbytes(name: str) -> ModuleType:
    """`bitsandbytes.functional`, to read the named weight with.

    On some processors it fetches code from the hub when it is first imported, if the package `kernels` is there. Reading
    a checkpoint must not do that, and unpacking does not need it.
    """
    with contextlib.nullcontext() if "bitsandbytes" in sys.modules else _nothing_fetched():
        return _load(name, "bitsandbytes", "bitsandbytes.functional")


@contextlib.contextmanager
def _nothing_fetched() -> Iterator[None]:
    logger = logging.getLogger("bitsandbytes")
    # None in the place of a module says that it cannot be imported; may stand there already
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
    level, before = logger.level, {name: modules[name] for name in ("kernels",) if name in modules}
    logger.setLevel(logging.ERROR)  # it warns that it could not fetch that code
    modules["kernels"] = None
    try:
        yield
    finally:
        logger.setLevel(level)
        del modules["kernels"]
        modules |= before


def _load(name: str, library: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingLibrary(
            f"{name!r} is packed in a way that the library {library} unpacks, which cannot be imported ({error})",
            hint=f'Run `pip install "glu-probe[{library}]"`',
        ) from None
