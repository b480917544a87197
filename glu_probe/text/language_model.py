"""A language model that runs text, with both branches of its gated MLPs in reach.

The model runs in TransformerLens (`TransformerBridge`), in its raw mode, whose logits are those of transformers. Which of
its MLPs are gated, and what their factors are, the checkpoint says; the bridge is only asked where to listen. A check
before every run compares the two: a and b from the factors with the hooks', S(a) b with what the down projection gets, and the
MLP's output.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..activations import Activation
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.sites import Site
from ..errors import BadOption, FactorsDisagree, NoTokenizer, NotRunnable
from .hooks import Listener, feeding_norm, listener_of, normalised
from .loading import first_line, load_model, quiet

Branch = Float[Tensor, "batch position d_mlp"]
# Gets an MLP, its pre-activations a and b, and gives nothing back.
Receive = Callable[[Site, Branch, Branch], None]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_CHECKED = 64  # tokens of the check
_INNER = "_original_component"


class LanguageModel:
    """A causal language model, its checkpoint, and where to listen to its MLPs.

    Attributes:
        bridge: the TransformerBridge.
        checkpoint: the factors.
        tokenizer: a transformers tokenizer, or None.
        listeners: hook names by MLP.
        skipped: MLPs of the checkpoint that cannot be measured on text, and why.
    """

    def __init__(self, bridge: Any, checkpoint: Checkpoint, tokenizer: Any = None) -> None:
        self.bridge, self.checkpoint, self.tokenizer = bridge, checkpoint, tokenizer
        hooks = set(bridge.hook_dict)
        self.listeners: dict[Site, Listener] = {}
        self.skipped: dict[Site, str] = {}
        self._restore: list[Callable[[], object]] = []
        for site in checkpoint.sites:
            rules = checkpoint.rules_of(site)
            listener = listener_of(site, hooks, rules.multipliers)
            if isinstance(listener, str):
                self.skipped[site] = listener
            elif rules.activation is None:
                self.skipped[site] = "the activation is not known (name it with `activation=`, `--activation`)"
            elif rules.activation.up is not None:
                self.skipped[site] = (
                    f"the up branch acts as {rules.activation.up_formula}, and the theory is that of neurons linear in it"
                )
            else:
                self.listeners[site] = listener

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, *, device: str = "cpu", dtype: str = "float32", tokenizer: Any = None
    ) -> LanguageModel:
        """The model of a checkpoint, through transformers, for TransformerLens.

        Args:
            checkpoint: of a directory, a hub repository or a GGUF file; its code is never run.
            device: where to run.
            dtype: "float32" or "bfloat16".
            tokenizer: to go with it; see `load_tokenizer`.

        Raises:
            ModelTooLarge: its parameters do not fit into memory.
            NotRunnable: transformers or TransformerLens cannot build it.
            BadOption: there is no such dtype, or no such device here.
        """
        if dtype not in DTYPES:
            raise BadOption(f"dtype is {dtype!r}", hint=f"Use {' or '.join(DTYPES)}")
        return cls.wrap(load_model(checkpoint, DTYPES[dtype], device), checkpoint, tokenizer=tokenizer)

    @classmethod
    def wrap(cls, model: Any, checkpoint: Checkpoint, *, tokenizer: Any = None) -> LanguageModel:
        """A model that is in memory already: a TransformerBridge, or a transformers model, where it is.

        A transformers model is changed in place: its modules get hooks. `release` takes them off again.

        Raises:
            NoTokenizer: there is none for a transformers model.
            NotRunnable: TransformerLens does not know its architecture.
            FactorsDisagree: wrapped, its logits are not what they were before.
        """
        from transformer_lens.model_bridge import TransformerBridge

        if isinstance(model, TransformerBridge):
            return cls(model, checkpoint, tokenizer or model.tokenizer)
        if tokenizer is None:
            raise NoTokenizer("a model in memory comes without its tokenizer", hint="Give it with tokenizer=")
        restore = _prepare(model)
        device = str(next(model.parameters()).device)
        probe = torch.arange(1, 9, device=device)[None] % model.config.get_text_config().vocab_size
        try:
            with torch.inference_mode():
                before = model(probe).logits
            with quiet():
                bridge = TransformerBridge.boot_transformers(
                    checkpoint.name, hf_model=model, tokenizer=_for_bridge(tokenizer), device=device, dtype=model.dtype
                )
        except Exception as error:  # whatever it raises for an architecture that it does not know
            _undo(restore)
            known = "supported architecture" not in str(error)
            raise NotRunnable(
                f"TransformerLens cannot wrap it: {first_line(error)}"
                if known
                else f"TransformerLens has no bridge for {type(model).__name__}",
                where=checkpoint.name,
                hint="Its weights alone can be measured: `glu-probe report`",
            ) from None
        out = cls(bridge, checkpoint, tokenizer)
        out._restore = restore
        with torch.inference_mode():
            after = bridge(probe, return_type="logits", prepend_bos=False)
        difference = _relative(after.float(), before.float())
        if not difference < _TOLERANCE[before.dtype]:
            out.release()
            raise FactorsDisagree(
                f"in TransformerLens the model's logits differ from transformers' by {difference:.1e}",
                where=checkpoint.name,
                hint="Its bridge for this architecture is wrong; nothing measured through it would be right",
            )
        return out

    def release(self) -> None:
        """Give a transformers model back as it was before `wrap`; this object is of no use afterwards."""
        _undo(self._restore)

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations."""
        return next(self.bridge.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return next(self.bridge.parameters()).device

    @property
    def left_out(self) -> dict[str, list[str]]:
        """MLPs that cannot be measured on text, by reason."""
        found: dict[str, list[str]] = {}
        for site, reason in self.skipped.items():
            found.setdefault(reason, []).append(f"{site.tower} {site.where}")
        return found

    def heard(self, layers: Iterable[int] | None = None) -> list[Site]:
        """The MLPs that can be listened to, in order.

        Raises:
            NotRunnable: there is none in these layers; the message says why.
        """
        chosen = None if layers is None else set(layers)
        sites = [site for site in self.listeners if chosen is None or site.layer in chosen]
        if not sites:
            reasons = dict.fromkeys(r for s, r in self.skipped.items() if chosen is None or s.layer in chosen)
            raise NotRunnable(
                f"no gated MLP of these layers can be listened to: {'; '.join(reasons) or 'there is none'}",
                where=self.checkpoint.name,
                hint="Their weights alone can be measured: `glu-probe report`",
            )
        return sites

    def activation(self, site: Site) -> Activation:
        """Of an MLP that can be listened to, which is one whose activation is known."""
        act = self.checkpoint.activation_of(site)
        assert act is not None
        return act

    def value(self, site: Site) -> Float[Tensor, "d_mlp d_model"]:
        """Down columns as the model holds them, as rows; a view."""
        module = self.bridge.get_submodule(self.listeners[site].product.removesuffix(".hook_in"))
        return module.original_component.weight.detach().T

    def listen(self, ids: Int[Tensor, "batch position"], sites: Iterable[Site], receive: Receive) -> None:
        """Run tokens up to the last of these MLPs, and hand a and b of each to `receive` as they come.

        The order is that of the layers; tensors belong to the model and must not be changed.
        """
        sites, held = list(sites), {}
        left = set(sites)

        def hear(tensor: Tensor, hook: Any, *, site: Site, listener: Listener, name: str) -> None:
            held[name] = tensor
            if not {listener.gate, listener.up} <= held.keys():  # families differ in which comes first
                return
            a, b = (held.pop(branch).reshape(*ids.shape, -1) for branch in (listener.gate, listener.up))
            on_a, on_b, _ = listener.multipliers
            receive(site, a if on_a == 1 else a * on_a, b if on_b == 1 else b * on_b)
            left.discard(site)
            if not left:
                raise _Heard

        hooks = []
        for site in sites:
            listener = self.listeners[site]
            for name in (listener.gate, listener.up):
                hooks.append((name, partial(hear, site=site, listener=listener, name=name)))
        self._run(ids, hooks)

    def check(self, ids: Int[Tensor, "batch position"], sites: Iterable[Site]) -> dict[Site, float]:
        """Largest relative difference between the factors' and the model's own a, b, S(a) b and output, by MLP.

        Args:
            ids: a few tokens; the first 64 positions of the first sequence are used.
            sites: the MLPs to check; the factors of each are read once, one at a time.

        Raises:
            FactorsDisagree: a difference is larger than rounding explains, or the MLP reads another norm than they say.
        """
        sites, found = list(sites), {}
        # the norm on the output stands behind the hooks
        reader = (
            self.checkpoint.with_options(fold_post_norm=False)
            if self.checkpoint.options.fold_post_norm
            else self.checkpoint
        )
        held: dict[str, Tensor] = {}

        def keep(tensor: Any, hook: Any, *, name: str) -> None:
            if isinstance(tensor, Tensor):
                held[name] = tensor.clone()

        def compare(tensor: Tensor, hook: Any, *, site: Site) -> None:
            found[site] = self._difference(site, reader, held | {self.listeners[site].output: tensor})
            if len(found) == len(sites):
                raise _Heard

        hooks, wanted = [], {}
        for site in sites:
            listener = self.listeners[site]
            names = [f"{norm}.{end}" for norm in listener.norms for end in ("hook_in", "hook_out")]
            for name in (*names, listener.reads, listener.gate, listener.up, listener.product):
                wanted[name] = partial(keep, name=name)
            hooks.append((listener.output, partial(compare, site=site)))
        # what is kept first: a shared expert's hooks fire within its block's
        self._run(ids[:1, :_CHECKED], [*wanted.items(), *hooks])
        return found

    def _difference(self, site: Site, reader: Checkpoint, held: dict[str, Tensor]) -> float:
        """The largest relative difference in one MLP."""
        listener, layer, rules = self.listeners[site], reader.load(site), reader.rules_of(site)
        norm = feeding_norm(listener, held)
        if rules.known and (norm is None) != (rules.norm is None):
            stated = f"it reads the output of {rules.norm.words}" if rules.norm else "it reads no norm's output"
            raise self._disagreement(site, f"by the family's rules {stated}, but the model does otherwise")
        if rules.norm is not None and reader.options.fold_norm:
            module = self.bridge.get_submodule(norm).original_component
            x = normalised(
                held[f"{norm}.hook_in"], module, self.bridge.original_model.config, centred=rules.norm.kind == "layer"
            )
        else:
            x = held[listener.reads].float()
        x = x.reshape(-1, x.shape[-1]).cpu().to(layer.query.dtype)
        (a, b), on = layer.preactivations(x), listener.multipliers
        expected = {"a": a, "b": b, "S(a) b": layer.coefficients(x), "output": layer.forward(x)}
        heard = (
            held[listener.gate] * on[0], held[listener.up] * on[1], held[listener.product] * on[1],
            held[listener.output] * on[2],
        )  # fmt: skip
        differences = {
            what: _relative(tensor.reshape(value.shape).cpu().to(value.dtype), value)
            for (what, value), tensor in zip(expected.items(), heard, strict=True)
        }
        worst = max(differences, key=lambda what: (not differences[what] < float("inf"), differences[what]))
        if not differences[worst] < _TOLERANCE[self.dtype]:
            raise self._disagreement(
                site, f"{worst} from the factors differs from the model's own by {differences[worst]:.1e} of its size"
            )
        return differences[worst]

    def _disagreement(self, site: Site, what: str) -> FactorsDisagree:
        return FactorsDisagree(
            what,
            where=f"{self.checkpoint.name}, {site.where}",
            hint="The checkpoint is read with the wrong rules (see `glu-probe inspect`), or the model in memory is not the "
            "one on disk",
        )

    @torch.inference_mode()
    def logits(
        self, ids: Int[Tensor, "batch position"], hooks: Sequence[tuple[str, Callable]] = ()
    ) -> Float[Tensor, "batch position vocabulary"]:
        """The model's own, or with what the hooks put in the place of activations."""
        return self.bridge.run_with_hooks(
            ids.to(self.device), return_type="logits", prepend_bos=False, fwd_hooks=list(hooks), use_cache=False
        )

    @torch.inference_mode()
    def _run(self, ids: Tensor, hooks: Sequence[tuple[str, Callable]]) -> None:
        """Run until a hook says that it has heard enough: what comes behind, predictions too, costs time for nothing."""
        with contextlib.suppress(_Heard):
            self.bridge.run_with_hooks(
                ids.to(self.device), return_type=None, prepend_bos=False, fwd_hooks=list(hooks), use_cache=False
            )


class _Heard(Exception):
    """All that was to be heard was."""


def _relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference, over the size of what is expected there, in its row and in all of it.

    Rounding is as large as the terms of a sum are, and single tokens of language models have enormous ones.
    """
    size = expected.abs() + expected.square().mean(-1, keepdim=True).sqrt() + expected.square().mean().sqrt()
    difference = (found - expected).abs() / size.clamp(min=torch.finfo(expected.dtype).tiny)
    return difference.max().item()


# -- a model before and after ---------------------------------------------------------------------


def _prepare(model: Any) -> list[Callable[[], object]]:
    """Make a transformers model ready to be wrapped; returns what undoes it, last step first."""
    own = {path: (dict(module._parameters), dict(module._buffers)) for path, module in model.named_modules()}
    restore: list[Callable[[], object]] = [partial(_unwrap, model, own)]
    if model.training:
        restore.append(partial(model.train, True))
    model.eval()
    config = model.config
    before = getattr(config, "_attn_implementation", None)
    if hasattr(model, "set_attn_implementation") and before not in (None, "eager"):
        model.set_attn_implementation("eager")
        restore.append(partial(model.set_attn_implementation, before))
    if not getattr(config, "architectures", None):  # by which TransformerLens knows it
        config.architectures = [type(model).__name__]
        restore.append(partial(setattr, config, "architectures", None))
    return restore


def _undo(restore: list[Callable[[], object]]) -> None:
    while restore:
        restore.pop(0)()


def _unwrap(model: Any, own: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Put every module back in the place of the component that was built around it, with its own tensors and no others."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            while _INNER in child._modules:
                child = child._modules[_INNER]
                parent._modules[name] = child
    for path, module in model.named_modules():
        if path in own:
            module._parameters, module._buffers = own[path]


def _for_bridge(tokenizer: Any) -> Any:
    """A copy for TransformerLens, which sets tokens of it and asks for a name that those built on the spot lack."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.init_kwargs.setdefault("name_or_path", str(getattr(tokenizer, "name_or_path", "")))
    return tokenizer
