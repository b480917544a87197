"""Getting a causal language model into memory, if it fits, without running code that comes with it."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.ref import parse_ref
from ..errors import BadOption, ModelTooLarge, NotRunnable

_ROOM = 1.2  # activations, hooks and the libraries beside the parameters


def load_model(checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> Any:
    """The transformers model of a checkpoint, on a device.

    Raises:
        ModelTooLarge: its parameters do not fit into memory.
        BadOption: there is no such device here.
        NotRunnable: transformers cannot build it as a causal language model.
    """
    _refuse_unusable(device)
    _refuse_too_large(checkpoint, dtype, device)
    model = _from_transformers(checkpoint, dtype)
    try:
        return model.to(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise NotRunnable(
            f"it cannot be put on device {device!r}: {first_line(error)}",
            where=checkpoint.name,
            hint="Use --device cpu",
        ) from None


def _refuse_unusable(device: str) -> None:
    """Make sure that something can be computed there, before a model is loaded."""
    try:
        usable = bool(torch.zeros(1, device=device).add(1).item())
        reason = "nothing is computed there"
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        usable, reason = False, first_line(error)
    if not usable:
        raise BadOption(
            f"device is {device!r}: {reason}", hint="Give cpu, or cuda or mps where this machine and its torch have it"
        )


def _refuse_too_large(checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> None:
    needed = checkpoint.parameter_count * dtype.itemsize * _ROOM
    # it passes through main memory on its way to another device
    places = {"main memory": available_memory()}
    if device.startswith("cuda") and torch.cuda.is_available():
        places[f"the memory of {device}"] = torch.cuda.mem_get_info(device)[0]
    for place, available in places.items():
        if available is not None and needed > available:
            raise ModelTooLarge(
                f"running it in {str(dtype).removeprefix('torch.')} takes about {needed / 1e9:.1f} GB, and "
                f"{available / 1e9:.1f} GB of {place} are free",
                where=checkpoint.name,
                hint="Use --dtype bfloat16 if it is not used yet, a smaller model or a larger machine; the weights alone "
                "are measured by `glu-probe report` one layer at a time",
            )


def available_memory() -> int | None:
    """Bytes of main memory that can be had without swapping, where the system says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _from_transformers(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM, GgufConfig

    ref = parse_ref(checkpoint.ref)
    if ref.kind == "web":
        raise NotRunnable(
            "a model is run from a directory or a hub repository, and this is a URL", where=checkpoint.name,
            hint="Download its files into a directory, with those of its tokenizer, and give that",
        )  # fmt: skip
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager", "trust_remote_code": False}
    place = ref.repository if ref.kind == "hub" else ref.local
    if ref.kind == "hub":
        options["revision"] = ref.revision
        if ref.file and ref.file.lower().endswith(".gguf"):
            options |= {"gguf_file": ref.file, "quantization_config": GgufConfig(dequantize=True)}
    elif ref.kind == "file":
        place = ref.local.parent
        if ref.local.suffix.lower() == ".gguf":
            options |= {"gguf_file": ref.local.name, "quantization_config": GgufConfig(dequantize=True)}
    try:
        with quiet():
            return AutoModelForCausalLM.from_pretrained(place, **options)
    except Exception as error:  # transformers raises whatever its models do
        raise NotRunnable(
            f"transformers cannot load it as a causal language model: {first_line(error)}",
            where=checkpoint.name,
            hint="Its weights alone can be measured: `glu-probe report`",
        ) from None


def first_line(error: Exception) -> str:
    """What an error of another library says, short enough for a message."""
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return said if len(said) <= 200 else f"{said[:200]}..."


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and advice of the libraries that load models."""
    import transformers

    logging = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # bars that ask no one
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
