"""What an import costs, and that the index of public names is true."""

from __future__ import annotations

import subprocess
import sys

import pytest

import glu_probe as gp

HEAVY = (
    "torch",
    "pandas",
    "matplotlib",
    "seaborn",
    "numpy",
    "transformers",
    "transformer_lens",
    "huggingface_hub",
    "gguf",
)


@pytest.mark.parametrize("code", [
    "import glu_probe",
    "import glu_probe.cli\ntry: glu_probe.cli.main(['--help'])\nexcept SystemExit: pass",
    "import glu_probe.cli\ntry: glu_probe.cli.main(['report', '--help'])\nexcept SystemExit: pass",
])  # fmt: skip
def test_nothing_heavy_is_imported(code):
    check = f"{code}\nimport sys\nprint('LOADED', [name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_public_names_exist_and_are_few():
    assert len(gp.__all__) <= 26
    for name in gp.__all__:
        assert getattr(gp, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        gp.no_such_name  # noqa: B018


def test_every_public_function_has_a_docstring():
    for name in gp.__all__:
        entry = getattr(gp, name)
        if callable(entry):
            assert entry.__doc__, name


def test_public_names_survive_the_import_of_their_modules():
    """A submodule named like a public function would take its place once it is imported."""
    import pkgutil

    modules = {module.name for module in pkgutil.iter_modules(gp.__path__)}
    assert modules & {*gp.__all__} == {
        "conversions",
        "errors",
        "figures",
        "find",
        "forms",
        "measures",
        "sample_models",
        "symmetries",
        "testing",
    }
