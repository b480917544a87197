"""The modules that transformers would run, one at a time, with a checkpoint's own weights.

The model is built from the configuration alone: without memory for weights, and without any code but that of
transformers itself. Names and layouts are translated by transformers' own loader. An MLP is then copied out, and only
its tensors are read.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .feeds import feeds

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class NotComparable(Exception):
    """Why there is no module to compare with."""


Build = Callable[[], "PreTrainedModel"]


class ReferenceModels:
    """The classes of transformers that a configuration fits, built when first needed."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._built: list[ReferenceModel] = []
        self._unbuilt: Iterator[Build] | None = None
        self._trouble: str | None = None

    def find(self, names: Sequence[str]) -> tuple[ReferenceModel, str]:
        """The first model that has all these tensors of a file, and the path of the smallest module that holds them.

        Raises:
            NotComparable: there is none; the message says why.
        """
        for model in self._models():
            keys = [model.key(name) for name in names]
            known = [key for key in keys if key is not None]
            if len(known) == len(keys):
                return model, _common([key.rpartition(".")[0] for key in known])
        if not self._built:
            raise NotComparable(self._trouble)
        raise NotComparable(f"no parameter of {self._built[0].name} is loaded from {names[0]}")

    def _models(self) -> Iterator[ReferenceModel]:
        yield from self._built
        if self._unbuilt is None:
            with _quiet():
                self._unbuilt = self._classes()
        for build in self._unbuilt:
            try:
                with _quiet(), torch.device("meta"):
                    model = ReferenceModel(build())
            except Exception as error:  # whatever a class of transformers raises for a config it does not like
                self._trouble = f"transformers cannot build it from the config ({_line(error)})"
                continue
            self._built.append(model)
            yield model

    def _classes(self) -> Iterator[Build]:
        """Constructors, the class that the config names first."""
        try:
            import transformers
        except ImportError:
            self._trouble = "transformers is not installed: `pip install transformers`"
            return
        model_type = self._config.get("model_type")
        if model_type is None or model_type not in transformers.CONFIG_MAPPING:
            own = "; the code that the repository brings along is never run" if "auto_map" in self._config else ""
            says = f"has no model_type {model_type!r}" if model_type else "cannot tell the model without a model_type"
            self._trouble = f"transformers {transformers.__version__} {says}{own}"
            return
        # the weights arrive decoded, and no name in the config may lead to foreign code
        values = {k: v for k, v in self._config.items() if k not in ("auto_map", "quantization_config")}
        values = transformers.PreTrainedConfig._decode_special_floats(values)
        how: dict[str, Any] = {
            "dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager",
        }  # fmt: skip
        kind = transformers.CONFIG_MAPPING[model_type]

        def build(construct: Callable[..., PreTrainedModel], **options: Any) -> Build:
            return lambda: construct(kind.from_dict(copy.deepcopy(values)), **how, **options)

        for name in self._config.get("architectures") or ():
            named = getattr(transformers, str(name), None)
            if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
                yield build(named._from_config)
        self._trouble = f"transformers {transformers.__version__} has no model for a config of {model_type!r} alone"
        for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
            if kind in auto._model_mapping:
                yield build(auto.from_config, trust_remote_code=False)


class ReferenceModel:
    """A model of transformers without weights, and its loader's translation of names and layouts."""

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self._model = model.eval()
        mapping = get_model_conversion_mapping(model) or []
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._state = model.state_dict()
        self.name = type(model).__name__

    def key(self, name: str) -> str | None:
        """The parameter that a tensor of a file is loaded into, None if the model has no such parameter."""
        return self._translated(name)[0]

    def _translated(self, name: str) -> tuple[str | None, str | None]:
        """Parameter, and the pattern of the converter that makes it if the tensor is not taken as it is."""
        from transformers.core_model_loading import rename_source_key

        base = self._model.base_model_prefix
        key, pattern = rename_source_key(name, self._renamings, self._converters, base, self._state)
        if key not in self._state and name in self._state:
            key, pattern = rename_source_key(name, [], [], base, self._state)
        return (key, pattern) if key in self._state else (None, None)

    def module(self, path: str) -> nn.Module:
        """The module of that path, without weights."""
        return self._model.get_submodule(path)

    def filled(self, path: str, names: Iterable[str], read: Callable[[str], Tensor], *, experts: int = 0) -> nn.Module:
        """A copy of the module of that path with weights.

        Args:
            path: of the module.
            names: tensors of the file that may belong to it; those that do are read.
            read: a tensor by name.
            experts: if not 0, how many experts the file's layer has; `read` then gives those of one of them, and the
                copy has that one only.

        Raises:
            NotComparable: a parameter is not in the file, or has another shape there.
        """
        from transformers.core_model_loading import dot_natural_key

        prefix = f"{path}."
        made: dict[str, list[tuple[str, str | None]]] = {}
        for name in sorted(names, key=dot_natural_key):
            key, pattern = self._translated(name)
            if key is not None and key.startswith(prefix):
                made.setdefault(key, []).append((name, pattern))
        values: dict[str, Tensor] = {}
        for key, parts in made.items():
            values |= self._converted(key, parts, read, bool(experts))
        module = copy.deepcopy(self.module(path))
        for key, value in values.items():
            _put(module, key.removeprefix(prefix), value, bool(experts))
        missing = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]
        if missing:
            raise NotComparable(f"{prefix}{missing[0]} of {self.name} is not in the file")
        return module

    def _converted(
        self, key: str, parts: list[tuple[str, str | None]], read: Callable[[str], Tensor], alone: bool
    ) -> dict[str, Tensor]:
        """The parameters that a group of tensors becomes."""
        if parts[0][1] is None:
            return {key: read(parts[0][0])}
        template = next(c for c in self._converters if parts[0][1] in c.source_patterns)
        converter: Any = copy.deepcopy(template)  # it takes tensors as well as futures of them
        for name, pattern in parts:
            assert pattern is not None  # what one converter takes has patterns throughout
            converter.add_tensor(key, name, pattern, read(name))
        model = _OneExpert(self._model) if alone else self._model
        try:
            made = converter.convert(key, model=model, config=self._model.config)
        except Exception as error:  # an operation of transformers that does not fit these tensors
            raise NotComparable(f"transformers' loader does not make {key} of them ({_line(error)})") from None
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def feeds(self, paths: Iterable[str]) -> dict[str, str | None]:
        """What each of these MLPs reads while the model runs; see `feeds`."""
        with _quiet():
            return feeds(self._model, paths)


class _OneExpert:
    """A model as loaders see it where one expert's tensors stand for all."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> Tensor:
        """The parameter, of one expert if it is one of several."""
        parameter = self._model.get_parameter(name)
        return parameter[:1] if parameter.ndim == 3 else parameter


def function_of(module: nn.Module, *, routed: bool) -> Callable[[Tensor], Tensor]:
    """What a module computes of [n, d_model]; of its only expert, if it is one for routed experts.

    Raises:
        NotComparable: it takes arguments that are not known here.
    """
    required = [
        parameter
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and (parameter.default is parameter.empty or parameter.name in ("router_indices", "routing_weights"))
    ]
    own = [parameter.ndim for parameter in module.parameters(recurse=False)]
    if routed and len(required) == 3:  # hidden states, indices and weights of the experts chosen for each
        weights = torch.tensor([1.0, 0.0])  # the same one twice, for modules that rely on several
        return _careful(
            module, lambda x: module(x, torch.zeros(len(x), 2, dtype=torch.long), weights.to(x.dtype).expand(len(x), 2))
        )
    if len(required) == 1 and not routed:
        return _careful(module, lambda x: module(x[None]))
    if len(required) == 1 and own and set(own) == {3}:  # all experts at once, each on its own rows
        return _careful(module, module)
    if len(required) == 1:
        raise NotComparable(f"{type(module).__name__} chooses its experts itself, so that none can be called alone")
    names = ", ".join(parameter.name for parameter in required)
    raise NotComparable(f"{type(module).__name__} cannot be called for one MLP alone (it takes {names})")


def _careful(module: nn.Module, call: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        try:
            out = call(x)
            return (out[0] if isinstance(out, tuple) else out).reshape(x.shape)
        except Exception as error:  # a module of transformers that wants more than its signature says
            raise NotComparable(f"{type(module).__name__} cannot be run for one MLP alone ({_line(error)})") from None

    return function


def _put(module: nn.Module, name: str, value: Tensor, alone: bool) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    wanted, found = tuple(getattr(owner, leaf).shape), tuple(value.shape)
    one_of_several = alone and found and wanted[1:] == found[1:] and wanted[0] % found[0] == 0
    if found != wanted and not one_of_several:
        raise NotComparable(f"{name} of {type(module).__name__} is {list(wanted)}, from the file {list(found)}")
    if leaf in owner._buffers:
        owner._buffers[leaf] = value
    else:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)


def _common(paths: Sequence[str]) -> str:
    """The path that all of them start with."""
    parts = [path.split(".") for path in paths]
    return ".".join(group[0] for group in _while_equal(zip(*parts, strict=False)))


def _while_equal(groups: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    for group in groups:
        if len({*group}) > 1:
            return
        yield group


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers has to say about configurations."""
    import logging

    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
