"""A language model that runs text, with both branches of its gated MLPs in reach.

The model runs in TransformerLens (`TransformerBridge`), in its raw mode, whose logits are those of transformers. Which of
its MLPs are gated, and what their factors are, the checkpoint says; the bridge is only asked where to listen. A check
before every run compares the two: a and b from the factors with the hooks', S(a) b with what the down projection gets, and the
MLP's output.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.layout import Site
from ..checkpoint.ref import parse_ref
from ..errors import BadOption, FactorsDisagree, ModelTooLarge, NotRunnable

Branch = Float[Tensor, "batch position d_mlp"]
# Gets an MLP, its pre-activations a and b, and nothing back.
Receive = Callable[[Site, Branch, Branch], None]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_CHECKED = 64  # tokens of the check


@dataclass(frozen=True)
class Listener:
    """Hook names of one MLP: what it reads (with and without the norm's gain), a, b, S(a) b and its output."""

    reads: str
    normalised: str | None
    gate: str
    up: str
    product: str
    output: str


class LanguageModel:
    """A causal language model, its checkpoint, and where to listen to its MLPs.

    Attributes:
        bridge: the TransformerBridge.
        checkpoint: the factors.
        tokenizer: a transformers tokenizer, or None.
        skipped: why MLPs of the checkpoint cannot be listened to, by name.
    """

    def __init__(self, bridge: Any, checkpoint: Checkpoint, tokenizer: Any = None) -> None:
        self.bridge, self.checkpoint, self.tokenizer = bridge, checkpoint, tokenizer
        hooks = set(bridge.hook_dict)
        self.listeners: dict[Site, Listener] = {}
        self.skipped: dict[str, str] = {}
        for site in checkpoint.sites:
            listener = _listener(site, hooks)
            if isinstance(listener, Listener):
                self.listeners[site] = listener
            else:
                self.skipped[f"{site.tower} {site.where}"] = listener

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, *, device: str = "cpu", dtype: str = "float32", tokenizer: Any = None
    ) -> LanguageModel:
        """The model of a checkpoint, through transformers, for TransformerLens.

        Args:
            checkpoint: of a directory, a hub repository or a GGUF file; its code is never run.
            device: where to run.
            dtype: "float32" or "bfloat16".
            tokenizer: to go with it; loaded elsewhere.

        Raises:
            ModelTooLarge: its parameters do not fit into memory.
            NotRunnable: transformers or TransformerLens cannot build it.
        """
        if dtype not in DTYPES:
            raise BadOption(f"dtype is {dtype!r}", hint=f"Use {' or '.join(DTYPES)}")
        _refuse_too_large(checkpoint, DTYPES[dtype], device)
        model = _from_transformers(checkpoint, DTYPES[dtype])
        return cls.wrap(model.to(device), checkpoint, tokenizer=tokenizer, device=device)

    @classmethod
    def wrap(cls, model: Any, checkpoint: Checkpoint, *, tokenizer: Any = None, device: str = "cpu") -> LanguageModel:
        """A model that is in memory already: a TransformerBridge, or a transformers model, which is wrapped in place.

        Raises:
            NotRunnable: TransformerLens does not know its architecture.
            FactorsDisagree: wrapped, its logits are not what they were before.
        """
        from transformer_lens.model_bridge import TransformerBridge

        if isinstance(model, TransformerBridge):
            return cls(model, checkpoint, tokenizer)
        model.eval()
        if hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation("eager")
        probe = torch.arange(1, 9, device=device)[None] % model.config.get_text_config().vocab_size
        with torch.inference_mode():
            before = model(probe).logits
        try:
            with _quiet():
                bridge = TransformerBridge.boot_transformers(
                    checkpoint.name, hf_model=model, tokenizer=tokenizer, device=device
                )
        except Exception as error:  # whatever it raises for an architecture that it does not know
            raise NotRunnable(
                f"TransformerLens cannot wrap this model: {_first_line(error)}", where=checkpoint.name
            ) from None
        with torch.inference_mode():
            after = bridge(probe, return_type="logits", prepend_bos=False)
        difference = _relative(after.float(), before.float())
        if not difference < _TOLERANCE[before.dtype]:
            raise FactorsDisagree(
                f"in TransformerLens the model's logits differ from transformers' by {difference:.1e}",
                where=checkpoint.name,
                hint="Its bridge for this architecture is wrong; nothing measured through it would be right",
            )
        return cls(bridge, checkpoint, tokenizer)

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations."""
        return next(self.bridge.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return next(self.bridge.parameters()).device

    def heard(self, layers: Sequence[int] | None = None) -> list[Site]:
        """The MLPs that can be listened to, in order.

        Raises:
            NotRunnable: there is none in these layers; the message says why.
        """
        sites = [site for site in self.listeners if layers is None or site.layer in layers]
        if not sites:
            reasons = dict.fromkeys(self.skipped.values())
            raise NotRunnable(
                f"no gated MLP of these layers can be listened to: {'; '.join(reasons) or 'there is none'}",
                where=self.checkpoint.name,
            )
        return sites

    def value(self, site: Site) -> Float[Tensor, "d_mlp d_model"]:
        """Down columns as the model holds them, as rows; a view."""
        module = self.bridge.get_submodule(self.listeners[site].product.removesuffix(".hook_in"))
        return module.original_component.weight.detach().T

    def listen(self, ids: Int[Tensor, "batch position"], sites: Iterable[Site], receive: Receive) -> None:
        """Run tokens up to the last of these MLPs, and hand a and b of each to `receive` as they come.

        The order is that of the layers; tensors belong to the model and must not be changed.
        """
        sites, gates = list(sites), {}

        def keep(tensor: Tensor, hook: Any, *, place: str) -> None:
            gates[place] = tensor

        def hand_over(tensor: Tensor, hook: Any, *, site: Site, place: str) -> None:
            receive(site, gates.pop(place), tensor)

        hooks = []
        for site in sites:
            listener = self.listeners[site]
            hooks.append((listener.gate, partial(keep, place=listener.gate)))
            hooks.append((listener.up, partial(hand_over, site=site, place=listener.gate)))
        self._run(ids, hooks, stop=max(site.layer for site in sites) + 1)

    def check(self, ids: Int[Tensor, "batch position"], sites: Iterable[Site]) -> dict[Site, float]:
        """Largest relative difference between the factors' and the model's own a, b, S(a) b and output, by MLP.

        Args:
            ids: a few tokens; the first 64 positions of the first sequence are used.
            sites: the MLPs to check; the factors of each are read once.

        Raises:
            FactorsDisagree: a difference is larger than rounding explains.
        """
        ids, found = ids[:1, :_CHECKED], {}
        for site in sites:
            listener, held = self.listeners[site], {}
            layer = self.checkpoint.load(site)
            folded = self.checkpoint.options.fold_norm and listener.normalised is not None
            names = {
                "x": listener.normalised if folded and "norm" in layer.sources else listener.reads,
                "a": listener.gate, "b": listener.up, "S(a) b": listener.product, "output": listener.output,
            }  # fmt: skip
            hooks = [(name, partial(_store, held=held, what=what)) for what, name in names.items()]
            self._run(ids, hooks, stop=site.layer + 1)
            x = held.pop("x").float().cpu()
            a, b = layer.preactivations(x.to(layer.query.dtype))
            expected = {"a": a, "b": b}
            if layer.activation is not None:
                expected |= {"S(a) b": layer.coefficients(x.to(a.dtype)), "output": layer.forward(x.to(a.dtype))}
            differences = {what: _relative(held[what].float().cpu(), value.float()) for what, value in expected.items()}
            worst = max(differences, key=differences.get)
            found[site] = differences[worst]
            if not found[site] < _TOLERANCE[self.dtype]:
                raise FactorsDisagree(
                    f"{worst} from the factors differs from the model's own by {found[site]:.1e} of its size",
                    where=f"{self.checkpoint.name}, {site.where}",
                    hint="The checkpoint is read with the wrong rules (see `glu-probe inspect`), or the model in memory "
                    "is not the one on disk",
                )
        return found

    @torch.inference_mode()
    def _run(self, ids: Tensor, hooks: list, stop: int | None = None) -> None:
        count = len(self.bridge.blocks)
        self.bridge.run_with_hooks(
            ids.to(self.device),
            return_type=None,
            prepend_bos=False,
            fwd_hooks=hooks,
            **({"stop_at_layer": stop} if stop is not None and stop < count else {}),
        )


def _store(tensor: Tensor, hook: Any, *, held: dict[str, Tensor], what: str) -> None:
    held[what] = tensor.clone()


def _listener(site: Site, hooks: set[str]) -> Listener | str:
    """Where to listen to an MLP, or why that cannot be done."""
    if site.tower != "text":
        return f"the {site.tower} tower does not run on text"
    if site.group == "routed":
        return "routed experts run batched, without hooks for neurons"
    block = f"blocks.{site.layer}."
    stems = (
        (f"{block}mlp.shared_experts.", f"{block}mlp.shared_expert.")
        if site.group == "shared"
        else (f"{block}mlp.", f"{block}mlp.dense_")
    )
    for stem in stems:
        names = {role: f"{stem}{part}" for role, part in (
            ("gate", "gate.hook_out"), ("up", "in.hook_out"), ("product", "out.hook_in"), ("output", "out.hook_out"),
        )}  # fmt: skip
        if set(names.values()) <= hooks:
            normalised = next(
                (name for norm in ("ln2", "ln1") if (name := f"{block}{norm}.hook_normalized") in hooks), None
            )
            return Listener(reads=f"{stem}gate.hook_in", normalised=normalised, **names)
    return "TransformerLens has no hooks for its branches"


def _relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the root mean square of what is expected."""
    scale = expected.square().mean().sqrt().clamp(min=torch.finfo(expected.dtype).tiny)
    return ((found - expected).abs().max() / scale).item()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


@contextlib.contextmanager
def _quiet():
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


def _refuse_too_large(checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> None:
    if device != "cpu":
        return
    needed = checkpoint.parameter_count * dtype.itemsize
    available = _available_memory()
    if available is not None and needed * 1.2 > available:
        raise ModelTooLarge(
            f"running it in {str(dtype).removeprefix('torch.')} takes about {needed * 1.2 / 1e9:.1f} GB, and "
            f"{available / 1e9:.1f} GB are free",
            where=checkpoint.name,
            hint="Use --dtype bfloat16, a smaller model or a larger machine; the weights alone are measured by "
            "`glu-probe report` one layer at a time",
        )


def _available_memory() -> int | None:
    """Bytes that can be had without swapping, where the system says."""
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
    options = {"dtype": dtype, "attn_implementation": "eager", "trust_remote_code": False}
    place = ref.repo if ref.kind == "hub" else ref.path
    if ref.kind == "hub":
        options["revision"] = ref.revision
    elif ref.kind == "file":
        place = ref.path.parent
        if ref.path.suffix.lower() == ".gguf":
            options |= {"gguf_file": ref.path.name, "quantization_config": GgufConfig(dequantize=True)}
    try:
        with _quiet():
            return AutoModelForCausalLM.from_pretrained(place, **options)
    except Exception as error:  # transformers raises whatever its models do
        raise NotRunnable(
            f"transformers cannot load it as a causal language model: {_first_line(error)}", where=checkpoint.name
        ) from None
