"""The tokenizer that goes with a model, from its files, its GGUF or the hub."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checkpoint.hub import translated
from ..checkpoint.ref import ModelRef, parse_ref
from ..errors import NoTokenizer

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt",
    "tekken.json", "tokenizer_config.json",
)  # fmt: skip


def load_tokenizer(ref: str | os.PathLike | ModelRef) -> Any:
    """The Hugging Face tokenizer that goes with a model. Code that comes with a model is never run.

    Args:
        ref: a directory, a .gguf file (whose own tokenizer is used), another file (its directory is looked in), or a
            hub repository as org/name or org/name@revision. An existing path wins over the hub.

    Returns:
        A transformers tokenizer; its `name_or_path` is the short name of the reference.

    Raises:
        NoTokenizer: there is none, or it cannot be loaded.
        PathNotFound, RepoNotFound, GatedRepo, RevisionNotFound, NotCached, HubUnavailable: as for models.
    """
    ref = ref if isinstance(ref, ModelRef) else parse_ref(ref)
    if ref.kind == "web":
        raise NoTokenizer(
            "a tokenizer is read from a directory or a hub repository, and this is a URL", where=ref.name,
            hint="Download the model's files into a directory and give that",
        )  # fmt: skip
    if ref.kind == "hub":
        tokenizer = _from_hub(ref)
    elif ref.is_gguf:
        tokenizer = _from_gguf(ref.local.absolute())
    else:
        tokenizer = _from_directory((ref.local if ref.kind == "directory" else ref.local.parent).absolute())
    tokenizer.name_or_path = ref.name
    return tokenizer


def _from_hub(ref: ModelRef) -> Any:
    def refuse(error: Exception) -> None:
        cause = _hub_error(error)
        if cause is not None:
            with translated(ref.repository, ref.revision):
                raise cause from None

    kind = {"gguf_file": ref.file} if ref.is_gguf else {}
    return _loaded(ref.name, ref.repository, revision=ref.revision or "main", refuse=refuse, **kind)


def _from_gguf(path: Path) -> Any:
    hint = "Download the file again, or give a tokenizer from elsewhere"
    return _loaded(path, str(path.parent), gguf_file=path.name, hint=hint)


def _from_directory(directory: Path) -> Any:
    # Without its files transformers makes an empty tokenizer for some families and says nothing.
    if any((directory / name).is_file() for name in TOKENIZER_FILES):
        return _loaded(directory, str(directory))
    ggufs = [path for path in directory.glob("*.gguf") if path.is_file()]
    if len(ggufs) == 1:
        return _from_gguf(ggufs[0])
    several = f", and which of {len(ggufs)} .gguf files has the right one is not known" if ggufs else ""
    raise NoTokenizer(f"there are no tokenizer files in this directory{several}", where=directory, hint=looked_for())


def looked_for() -> str:
    """What could be done about a tokenizer that is not there."""
    return (
        f"Looked for {', '.join(TOKENIZER_FILES[:-1])} and {TOKENIZER_FILES[-1]}: put the model's tokenizer files beside "
        "its weights, or give a tokenizer from elsewhere"
    )


def _loaded(
    where: object,
    place: str,
    *,
    hint: str | None = None,
    refuse: Callable[[Exception], None] | None = None,
    **kwargs: Any,
) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **kwargs)
    except Exception as error:
        if refuse is not None:
            refuse(error)
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        said = said if len(said) < 300 else f"{said[:300]}..."
        raise NoTokenizer(
            f"the tokenizer cannot be loaded ({said.rstrip('.')})", where=where, hint=hint or looked_for()
        ) from None
    if len(tokenizer) <= len(tokenizer.all_special_ids) + 1:
        raise NoTokenizer("the tokenizer has no vocabulary", where=where, hint=hint or looked_for())
    return tokenizer


def _hub_error(error: BaseException | None) -> BaseException | None:
    """The error of huggingface_hub that transformers hides behind its own, unless it only says that a file is absent."""
    from huggingface_hub import errors as hub

    unavailable = (hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError)
    while error is not None:
        refused = isinstance(error, hub.HfHubHTTPError) and not isinstance(error, hub.EntryNotFoundError)
        if refused or isinstance(error, unavailable):
            return error
        error = error.__cause__ or error.__context__
    return None
