"""From what a user calls text to sequences of token ids: `read_texts`, `load_tokenizer`, `tokenize`.

The tokenizer decides about a token at the beginning: where it prepends one by itself, every sequence gets it, because a
model trained so reads the rest wrongly without it; where it does not, none is added. There is no padding: sequences of
equal length are batched, so no position is ever a made-up one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ..checkpoint.hub import translated
from ..checkpoint.ref import ModelRef, parse_ref
from ..checkpoint.sniff import kind_of, opened, refuse_lfs_text
from ..errors import BadOption, MissingLibrary, NoTokenizer, PathNotFound, TextTooShort, TextUnreadable, Unreadable

TEXT_SUFFIXES = (".txt", ".md")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt",
    "tekken.json", "tokenizer_config.json",
)  # fmt: skip
_BINARY = ("a safetensors", "a GGUF", "a zip", "a Python pickle", "a gzip")
_DATASET = re.compile(r"hf:(?P<name>[^:@#\s]+)(?::(?P<config>[^@#]+))?(?:@(?P<split>[^#]+))?(?:#(?P<column>.+))?")
_NAMES_SHOWN = 20


# -- texts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Document:
    """A text and what to call it in messages."""

    name: str
    text: str


def read_texts(
    source: str | os.PathLike | Sequence[str] | None = None, *, dataset_characters: int = 4_000_000
) -> list[Document]:
    """The texts of a source, in order. Line ends become newlines and a byte order mark is dropped; nothing else changes.

    Args:
        source: a file; a directory (all .txt and .md files below it, in natural order; hidden and blank ones are left
            out); a list of strings, which are the texts themselves; "-" for standard input;
            "hf:NAME[:config][@split][#column]" for a dataset of the Hugging Face hub (by default the split "train" and
            the column "text", or the only one with strings; blank rows are left out); None for the sample that comes
            with this package, 3,500 words of English prose.
        dataset_characters: rows of a dataset are read until there are so many characters. Datasets are streamed.

    Raises:
        PathNotFound, Unreadable: there is no such path, or the system does not let it be read.
        TextUnreadable: not text, not UTF-8, or no such dataset, split or column.
        TextTooShort: there is nothing in it.
        MissingLibrary: a dataset is asked for and `datasets` is not installed.
        LFSPointer: a file is a stand-in that Git left.
    """
    if source is None:
        sample = resources.files(__package__).joinpath("sample.txt").read_bytes()
        return [_decoded("sample", sample, "the sample of glu-probe")]
    if isinstance(source, str) and source == "-":
        return [_standard_input()]
    if isinstance(source, str) and source.startswith("hf:"):
        return _dataset_rows(source, dataset_characters)
    if isinstance(source, (str, os.PathLike)):
        return _from_path(source)
    if isinstance(source, Sequence) and not isinstance(source, (bytes, bytearray)):
        return _given(source)
    raise TextUnreadable(
        f"a text cannot be a {type(source).__name__}",
        hint='Give a path, a list of strings, "-", "hf:NAME", or None for the bundled sample',
    )


def _given(texts: Sequence[str]) -> list[Document]:
    if not texts:
        raise TextTooShort("the list of texts is empty", hint="Give at least one string")
    documents = []
    for number, text in enumerate(texts, 1):
        where = f"text {number} of the list"
        if not isinstance(text, str):
            raise TextUnreadable(f"a string is expected, found a {type(text).__name__}", where=where)
        documents.append(_document(f"text {number}", text, where))
    return documents


def _from_path(source: str | os.PathLike) -> list[Document]:
    try:
        path = Path(source).expanduser()
    except RuntimeError:  # ~name of a user that does not exist
        path = Path(source)
    where = path.absolute()
    try:
        exists = os.fspath(source) != "" and path.exists()
        if exists and path.is_dir():
            return _directory(path)
    except PermissionError as error:
        raise Unreadable(
            f"the path cannot be looked at: {error.strerror}", where=where, hint="Check its permissions"
        ) from None
    except (OSError, ValueError):  # a name too long or with a NUL
        exists = False
    if not exists:
        raise PathNotFound(
            "there is no such file or directory",
            where=where if os.fspath(source) else "''",
            hint="Give an existing path; a text itself goes into a list: [text]",
        )
    return [_file(path, path.name)]


def _directory(directory: Path) -> list[Document]:
    def refuse(error: OSError) -> None:
        raise Unreadable(
            f"the directory cannot be listed: {error.strerror}", where=error.filename, hint="Check its permissions"
        ) from None

    names = []
    for folder, below, files in os.walk(directory.absolute(), onerror=refuse):
        below[:] = [name for name in below if not name.startswith(".")]
        names += [
            Path(folder, name).relative_to(directory.absolute()).as_posix()
            for name in files
            if name.lower().endswith(TEXT_SUFFIXES) and not name.startswith(".")
        ]
    if not names:
        raise TextTooShort(
            f"there is no {' or '.join(TEXT_SUFFIXES)} file in this directory or below it",
            where=directory.absolute(), hint="Give another directory, or a file, which may have any name",
        )  # fmt: skip
    documents = [_file(directory / name, name, blank_is_fine=True) for name in sorted(names, key=_natural)]
    documents = [document for document in documents if document.text.strip()]
    if not documents:
        raise TextTooShort(f"all {len(names)} text files are empty", where=directory.absolute())
    return documents


def _natural(name: str) -> tuple:
    """Sorts "part 2" before "part 10", and the files of a directory together."""
    pieces = [re.split(r"([0-9]+)", part) for part in name.split("/")]
    return tuple(tuple(int(p) if i % 2 else p.casefold() for i, p in enumerate(part)) for part in pieces), name


def _file(path: Path, name: str, *, blank_is_fine: bool = False) -> Document:
    with opened(path.absolute()) as file:
        raw = file.read()
    return _decoded(name, raw, path.absolute(), blank_is_fine=blank_is_fine)


def _standard_input() -> Document:
    stream = getattr(sys.stdin, "buffer", sys.stdin)
    read = stream.read() if stream is not None else b""
    raw = read if isinstance(read, bytes) else read.encode("utf-8", "surrogateescape")
    return _decoded("standard input", raw, "standard input")


def _decoded(name: str, raw: bytes, where: object, *, blank_is_fine: bool = False) -> Document:
    """The text that these bytes are, if they are text."""
    head = raw[:512]
    refuse_lfs_text(head, where, "Fetch it with `git lfs pull`")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        hint = "Save it as UTF-8: `iconv -f UTF-16 -t UTF-8 FILE`"
        raise TextUnreadable("this is UTF-16 text, or not text at all", where=where, hint=hint)
    kind = "a PDF file" if raw.startswith(b"%PDF-") else kind_of(head)
    if kind == "a PDF file" or kind.startswith(_BINARY) or b"\0" in raw:
        kind = kind if kind.startswith(("a PDF", *_BINARY)) else "a binary file"
        raise TextUnreadable(f"this is {kind}, not text", where=where, hint="Give a plain text file in UTF-8")
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise TextUnreadable(
            f"this is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}",
            where=where,
            hint="Save it as UTF-8, for instance `iconv -f LATIN1 -t UTF-8 FILE` if it is Latin-1",
        ) from None
    return _document(name, text.replace("\r\n", "\n").replace("\r", "\n"), where, blank_is_fine=blank_is_fine)


def _document(name: str, text: str, where: object, *, blank_is_fine: bool = False) -> Document:
    if not blank_is_fine and not text.strip():
        raise TextTooShort("there is no text in it", where=where)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextUnreadable(
            f"character {error.start} is half of a surrogate pair, which is no character", where=where,
            hint='Decode the text properly, or replace such characters: text.encode("utf-8", "replace").decode()',
        ) from None  # fmt: skip
    return Document(name, text)


def _dataset_rows(source: str, characters: int) -> list[Document]:
    match = _DATASET.fullmatch(source)
    if match is None:
        raise BadOption(
            f"{source!r} does not name a dataset",
            hint="Write hf:NAME[:config][@split][#column], as in hf:Salesforce/wikitext:wikitext-2-raw-v1@test#text",
        )
    if characters < 1:
        raise BadOption(f"dataset_characters is {characters}; at least 1 is needed")
    name, config, split = match["name"], match["config"], match["split"] or "train"
    try:
        import datasets
    except ImportError:
        raise MissingLibrary(
            "reading a dataset of the hub needs the library `datasets`, which is not installed",
            where=source, hint='Run `pip install "glu-probe[datasets]"`, or give a text file',
        ) from None  # fmt: skip
    documents, column, read = [], match["column"], 0
    try:
        for number, row in enumerate(datasets.load_dataset(name, config, split=split, streaming=True)):
            column = column if column in row else _text_column(row, column, source)
            text = row[column]
            if not isinstance(text, str | None):
                raise TextUnreadable(
                    f"column {column!r} holds a {type(text).__name__} in row {number}, not text", where=source,
                    hint=f"Name another with #column; there are {', '.join(map(repr, row))}",
                )  # fmt: skip
            if text and text.strip():
                documents.append(_document(f"{name} row {number}", text, f"{source} row {number}"))
                read += len(text)
            if read >= characters:
                break
    except TextUnreadable:
        raise
    except Exception as error:
        # What these say of configs and splits helps; messages of network libraries can quote requests, token and all.
        said = (str(error).strip().splitlines() or [""])[0].rstrip(".") if isinstance(error, ValueError) else ""
        raise TextUnreadable(
            f"the dataset cannot be read ({type(error).__name__}{f': {said}' if said else ''})", where=source,
            hint="Check the spelling of name, config and split, the network, and whether you may read it",
        ) from None  # fmt: skip
    if not documents:
        raise TextTooShort("there is no text in it", where=source)
    return documents


def _text_column(row: dict[str, Any], asked: str | None, source: str) -> str:
    strings = [name for name, value in row.items() if isinstance(value, str)]
    if asked is None and ("text" in strings or len(strings) == 1):
        return "text" if "text" in strings else strings[0]
    raise TextUnreadable(
        f"there is no column {asked!r}" if asked else f"{len(strings)} columns hold strings and none is called 'text'",
        where=source, hint=f"Name one with #column; there are {', '.join(map(repr, row))}",
    )  # fmt: skip


# -- tokenizers ---------------------------------------------------------------------------------


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
        tokenizer = _from_gguf(ref.path.absolute())
    else:
        tokenizer = _from_directory((ref.path if ref.kind == "directory" else ref.path.parent).absolute())
    tokenizer.name_or_path = ref.name
    return tokenizer


def _from_hub(ref: ModelRef) -> Any:
    def refuse(error: Exception) -> None:
        cause = _hub_error(error)
        if cause is not None:
            with translated(ref.repo, ref.revision):
                raise cause from None

    kind = {"gguf_file": ref.file} if ref.is_gguf else {}
    return _loaded(ref.name, ref.repo, revision=ref.revision or "main", refuse=refuse, **kind)


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
    raise NoTokenizer(f"there are no tokenizer files in this directory{several}", where=directory, hint=_looked_for())


def _looked_for() -> str:
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
            f"the tokenizer cannot be loaded ({said.rstrip('.')})", where=where, hint=hint or _looked_for()
        ) from None
    if len(tokenizer) <= len(tokenizer.all_special_ids) + 1:
        raise NoTokenizer("the tokenizer has no vocabulary", where=where, hint=hint or _looked_for())
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


# -- tokens -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Tokens:
    """Sequences of token ids, ready for a model.

    Attributes:
        sequences: each [position] int64, in the order of the text, with the tokenizer's leading token where it has one.
        length: tokens of a full sequence, the leading one included.
        bos_ids: what the tokenizer puts before a text by itself, nearly always one token; empty if nothing.
        bos_token: the same, spelled out; None if nothing.
        eos_token: what stands between documents in one sequence; None for two newlines, or where documents are apart.
        packed: whether a sequence may hold the end of one document and the beginning of the next.
        tokenizer: its name.
        vocabulary: number of its tokens.
        documents: names of the documents.
        text_sha256: hash of the UTF-8 text, documents joined by a NUL.
        left_out: tokens at ends of documents that were too few for a sequence of their own.
        part: how this part was taken from all sequences; None for all.
    """

    sequences: list[Int[Tensor, " position"]]
    length: int
    bos_ids: tuple[int, ...]
    bos_token: str | None
    eos_token: str | None
    packed: bool
    tokenizer: str
    vocabulary: int
    documents: tuple[str, ...]
    text_sha256: str
    left_out: int = 0
    part: str | None = None

    @property
    def has_bos(self) -> bool:
        """Whether every sequence begins with a token that is not of the text."""
        return bool(self.bos_ids)

    @property
    def n_tokens(self) -> int:
        """Tokens of the text, without those at the beginning of each sequence."""
        return sum(len(ids) - len(self.bos_ids) for ids in self.sequences)

    @property
    def n_documents(self) -> int:
        """Number of documents that were given."""
        return len(self.documents)

    def batches(self, max_tokens: int) -> Iterator[tuple[list[int], Int[Tensor, "batch position"]]]:
        """Sequences of equal length together, the longest first, each length in the order of the text.

        Args:
            max_tokens: at most so many in a batch, leading ones included; a longer sequence is a batch of its own.

        Yields:
            Indices into `sequences`, and their ids as one tensor. Every sequence comes exactly once.

        Raises:
            BadOption: max_tokens is below 1.
        """
        _at_least(1, max_tokens=max_tokens)
        by_length: dict[int, list[int]] = {}
        for index, ids in enumerate(self.sequences):
            by_length.setdefault(len(ids), []).append(index)
        return (
            (indices[start : start + size], torch.stack([self.sequences[i] for i in indices[start : start + size]]))
            for length, indices in sorted(by_length.items(), reverse=True)
            for size in [max(1, max_tokens // length)]
            for start in range(0, len(indices), size)
        )

    def split(self, share: float = 0.5, seed: int = 0) -> tuple[Tokens, Tokens]:
        """Two parts that share no sequence, drawn at random, each in the order of the text.

        Args:
            share: of the sequences, for the first part, between 0 and 1; each part gets at least one.
            seed: same seed, same parts.

        Raises:
            BadOption: share is not between 0 and 1.
            TextTooShort: there is only one sequence.
        """
        if not 0 < share < 1:
            raise BadOption(f"share is {share}; it must lie between 0 and 1")
        count = len(self.sequences)
        size = min(max(round(share * count), 1), count - 1)
        drawn = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:size].tolist()
        return self._parts(set(drawn), f"split with share {share} and seed {seed}")

    def split_every(self, k: int) -> tuple[Tokens, Tokens]:
        """Two parts that share no sequence: all but every k-th, and every k-th.

        Raises:
            BadOption: k is below 2.
            TextTooShort: there are fewer than k sequences.
        """
        _at_least(2, k=k)
        return self._parts({i for i in range(len(self.sequences)) if (i + 1) % k}, f"split at every sequence of {k}")

    def _parts(self, first: set[int], how: str) -> tuple[Tokens, Tokens]:
        if not 0 < len(first) < len(self.sequences):
            raise TextTooShort(
                f"{len(self.sequences)} sequences of {self.length} tokens are too few to be split like this",
                hint="Give more text, or a shorter length",
            )
        how = how if self.part is None else f"{self.part}; {how}"
        numbers = range(len(self.sequences))
        return tuple(
            dataclasses.replace(
                self,
                sequences=[self.sequences[i] for i in numbers if (i in first) is wanted],
                part=f"{how}, {'first' if wanted else 'second'} part",
            )
            for wanted in (True, False)
        )

    def words(self) -> dict[str, Any]:
        """What was run, for provenance: only numbers, strings and lists of them."""
        ids = hashlib.sha256()
        for sequence in self.sequences:
            ids.update((",".join(map(str, sequence.tolist())) + "\n").encode())
        between = (self.eos_token or "two newlines") if self.packed else "a new sequence"
        return {
            "documents": self.n_documents,
            "document_names": list(self.documents[:_NAMES_SHOWN]),
            "text_sha256": self.text_sha256,
            "tokenizer": self.tokenizer,
            "vocabulary": self.vocabulary,
            "tokens": self.n_tokens,
            "tokens_left_out": self.left_out,
            "sequences": len(self.sequences),
            "sequence_length": self.length,
            "bos": "before every sequence, as this tokenizer adds it"
            if self.has_bos
            else "none: this tokenizer adds none",
            "bos_token": self.bos_token,
            "between_documents": between if self.n_documents > 1 else None,
            "part": self.part or "all",
            "ids_sha256": ids.hexdigest(),
        }


def tokenize(
    documents: Sequence[Document],
    tokenizer: Any,
    *,
    length: int = 256,
    tokens: int | None = None,
    pack: bool = True,
    max_length: int | None = None,
) -> Tokens:
    """Cut texts into sequences of token ids.

    The documents follow each other in order. What is left at the end is a shorter sequence if it has at least 2 tokens of
    the text. Tokens that a tokenizer would put at the end of a text are not added. A special token that is spelled out
    in the text becomes that token, as the tokenizer has it.

    Args:
        documents: from `read_texts`.
        tokenizer: a transformers tokenizer, used as it is; see `load_tokenizer`.
        length: tokens of a sequence, with the leading one of tokenizers that have it.
        tokens: at most so many tokens of the text are used; the last sequence is cut. None for all.
        pack: join the documents, with the tokenizer's end-of-text token between two of them, or two newlines if it has
            none; so a sequence can hold parts of several. If False, every document begins a sequence of its own.
        max_length: positions the model has, if that is known.

    Raises:
        NoTokenizer: `tokenizer` is None.
        BadOption: `length` or `tokens` is too small, or `length` beyond `max_length`.
        TextTooShort: there are not even 2 tokens.
    """
    if tokenizer is None:
        raise NoTokenizer("there is no tokenizer to turn text into tokens", hint=_looked_for())
    if tokens is not None:
        _at_least(2, tokens=tokens)
    _at_least(2, length=length)
    if max_length is not None and length > max_length:
        raise BadOption(f"length is {length}, but the model has only {max_length} positions")
    if not documents:
        raise TextTooShort("there are no documents")
    bos = _leading(tokenizer, documents)
    if length - len(bos) < 2:
        raise BadOption(
            f"length is {length}, which leaves {length - len(bos)} for text after the tokenizer's leading {_spelled(tokenizer, bos)}",
            hint=f"Give at least {len(bos) + 2}",
        )
    eos = tokenizer.eos_token_id if pack and len(documents) > 1 else None
    sequences, left_out = [], 0
    for stream in _streams(documents, tokenizer, eos, tokens, pack):
        for start in range(0, len(stream), length - len(bos)):
            piece = stream[start : start + length - len(bos)]
            if len(piece) < 2:
                left_out += len(piece)
            else:
                sequences.append(torch.tensor(bos + piece, dtype=torch.int64))
    if not sequences:
        raise TextTooShort(
            "the text is shorter than 2 tokens", where=", ".join(d.name for d in documents[:3]), hint="Give more text"
        )
    return Tokens(
        sequences=sequences,
        length=length,
        bos_ids=tuple(bos),
        bos_token=_spelled(tokenizer, bos) if bos else None,
        eos_token=None if eos is None else tokenizer.convert_ids_to_tokens(eos),
        packed=pack and len(documents) > 1,
        tokenizer=str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__),
        vocabulary=len(tokenizer),
        documents=tuple(document.name for document in documents),
        text_sha256=hashlib.sha256("\0".join(d.text for d in documents).encode("utf-8", "surrogatepass")).hexdigest(),
        left_out=left_out,
    )


def _streams(
    documents: Sequence[Document], tokenizer: Any, eos: int | None, tokens: int | None, pack: bool
) -> Iterator[list[int]]:
    """Ids that are to be cut into sequences, `tokens` at most in all of them together."""
    left = sys.maxsize if tokens is None else tokens
    if pack and eos is None:
        yield _ids(tokenizer, "\n\n".join(document.text for document in documents), left)[:left]
        return
    joined: list[int] = []
    for number, document in enumerate(documents):
        ids = ([eos] if pack and number else []) + _ids(tokenizer, document.text, left)
        if pack:
            joined += ids[:left]
        else:
            yield ids[:left]
        left -= len(ids[:left])
        if left == 0:
            break
    if pack:
        yield joined


def _ids(tokenizer: Any, text: str, enough: int) -> list[int]:
    """Ids of a text, or of a beginning of it that has more than enough of them: tokenizers are slow on large texts."""
    size = min(len(text), 16 * enough + 4096)
    while True:
        ids = _encoded(tokenizer, text[:size], special=False)
        if size == len(text) or len(ids) > enough + 256:  # the cut disturbs only the last few
            return ids
        size = min(len(text), 4 * size)


def _encoded(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    encoded = tokenizer(text, add_special_tokens=special, padding=False, truncation=False, verbose=False)
    return list(encoded["input_ids"])


def _leading(tokenizer: Any, documents: Sequence[Document]) -> list[int]:
    """What this tokenizer puts before a text by itself."""
    for text in ("The", *(document.text[:1000] for document in documents)):
        alone, whole = (_encoded(tokenizer, text, special=special) for special in (False, True))
        if alone:
            starts = range(len(whole) - len(alone) + 1)
            return next((whole[:start] for start in starts if whole[start : start + len(alone)] == alone), [])
    return []


def _spelled(tokenizer: Any, ids: Sequence[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(list(ids)))


def _at_least(least: int, **options: int) -> None:
    for name, value in options.items():
        if value < least:
            raise BadOption(f"{name} is {value}; at least {least} is needed")
