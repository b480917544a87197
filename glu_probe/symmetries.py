"""The symmetries of bilinear attention, as operations on the forms, and what each form keeps of them.

Per neuron, on the factors as they are written:

* exchange: (q, k) -> (k, q);
* inverse scaling: (q, k) -> (c q, k / c), c != 0 of either sign.

The symmetric forms keep both for every nonlinearity, because it acts on the product. In the gated form s(q.x) (k.x),
for every q and k (claims of N. Breslow, arXiv 2606.22172, with the conditions spelt out):

* exchange holds iff s(a) b = s(b) a for all a, b, that is iff s(z)/z is constant: s linear;
* scaling by c > 0 holds iff s(c z) = c s(z), for all such c iff s is positively homogeneous of degree 1: linear, ReLU;
* scaling by c = -1 holds iff s is odd: linear, tanh. ReLU breaks it;
* an s of degree p keeps (c q, k / c^p) instead, c > 0: squared ReLU with p = 2.

In the standard form and in the one with a global query the query of a neuron is static. The operations act on the
bilinear form it is equal to (`conversions.standard_to_bilinear`), whose query is the constant 1.

On the neurons of a real model use `GatedLayer.exchange`, which fixes the gauge first: how far a raw exchange moves the
output depends on the accidental scale of k, whether it moves it at all does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from .activations import Activation, activation
from .arguments import whole_number
from .conversions import global_query_to_standard, standard_to_bilinear
from .errors import BadOption
from .forms import FORMS, BilinearAttentionMLP, GatedMLP, GlobalQueryMLP, MLPForm, StandardMLP

if TYPE_CHECKING:
    import pandas as pd

Operation = Callable[[MLPForm], MLPForm]

TABLE_ACTIVATIONS = ("linear", "relu", "relu2", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh")
# float64 rounding leaves squared relative gaps near 1e-32; what breaks a symmetry here leaves more than 1e-3
_ROUNDING = 1e-20


def exchange(form: MLPForm) -> MLPForm:
    """The form with query and key of every neuron exchanged, biases alike.

    A form with static queries is returned as the bilinear form it is equal to, exchanged.
    """
    dynamic = _dynamic(form)
    swapped = {"query": dynamic.key, "key": dynamic.query}
    if dynamic.query_bias is not None or dynamic.key_bias is not None:
        zeros = torch.zeros_like(dynamic.query_bias if dynamic.key_bias is None else dynamic.key_bias)
        swapped |= {
            "query_bias": zeros if dynamic.key_bias is None else dynamic.key_bias,
            "key_bias": zeros if dynamic.query_bias is None else dynamic.query_bias,
        }
    return dynamic.with_factors(**swapped)


def rescale(form: MLPForm, c: float, *, degree: float = 1.0) -> MLPForm:
    """The form with (q, k) -> (c q, k / c^degree) for every neuron, biases alike.

    Args:
        form: any form. A global query is scaled as a whole; a standard MLP is returned as the bilinear form it is equal
            to, with its static query scaled.
        c: finite and not 0; with a degree that is not a whole number, > 0.
        degree: 1 for the inverse scaling of the theory.

    Raises:
        BadOption: c is 0 or not finite, the degree is not finite, or c^degree is not a real number or out of range.
    """
    if not _finite(c) or c == 0:
        raise BadOption(f"c is {c!r}", hint="Give a finite number that is not 0")
    if not _finite(degree):
        raise BadOption(f"degree is {degree!r}", hint="Give a finite number")
    try:
        inverse, net = c**-degree, c ** (1 - degree)
    except OverflowError:
        inverse = net = math.inf
    range_ = torch.finfo(form.value.dtype)
    if not all(_finite(factor) and range_.tiny <= abs(factor) <= range_.max for factor in (c, inverse, net)):
        raise BadOption(
            f"c is {c!r} and degree {degree!r}: c or c^degree is no number that a {str(form.value.dtype)[6:]} form can be "
            "multiplied and divided by",
            hint="A negative c needs a whole degree",
        )
    if isinstance(form, StandardMLP):
        form = standard_to_bilinear(form)
    changed: dict[str, Tensor] = {"query": form.get_parameter("query") * c, "key": form.key * inverse}
    # the key_bias of a global query stands beside the product (c q).(k / c^degree), not in a branch of it
    for name, factor in (("query_bias", c), ("key_bias", net if isinstance(form, GlobalQueryMLP) else inverse)):
        if getattr(form, name, None) is not None:
            changed[name] = getattr(form, name) * factor
    return form.with_factors(**changed)


def _finite(number: object) -> bool:
    return isinstance(number, (int, float)) and math.isfinite(number)


def _dynamic(form: MLPForm) -> Any:
    """The form itself, or the bilinear one that a form with static queries is equal to: one that has a query."""
    if isinstance(form, GlobalQueryMLP):
        form = global_query_to_standard(form)
    return standard_to_bilinear(form) if isinstance(form, StandardMLP) else form


@torch.no_grad()
def symmetry_gap(form: MLPForm, operation: Operation, x: Float[Tensor, "*batch d_model"]) -> float:
    """How far an operation moves a form's output: E|F - F'|^2 / (2 (E|F|^2 + E|F'|^2)) over the sample x.

    The scale of `exchange_asymmetry`: 0 a symmetry, 1/2 unrelated outputs, 1 opposite ones. Output biases are left out.

    Args:
        operation: takes a form and gives one, e.g. `exchange` or `lambda form: rescale(form, 2.0)`.
        x: inputs, of the form's dtype.

    Returns:
        NaN where both outputs are zero.
    """
    plain, changed = (_without_output_bias(f)(x).double() for f in (form, operation(form)))
    energy = plain.square().sum() + changed.square().sum()
    return ((plain - changed).square().sum() / (2 * energy)).item()


def _without_output_bias(form: MLPForm) -> MLPForm:
    if form.output_bias is None:
        return form
    return type(form).from_factors(form.activation, **{n: t for n, t in form.factors.items() if n != "output_bias"})


def verdict(form: type[MLPForm], act: Activation | str, symmetry: str) -> tuple[bool, str]:
    """Whether the theory says that a form keeps a symmetry for all its factors, and why.

    Args:
        form: one of `FORMS`.
        act: s, or its name.
        symmetry: a key of `SYMMETRIES`.

    Raises:
        BadOption: there is no such form or symmetry, or the symmetry needs a degree that s does not have.
    """
    act = activation(act)
    if form not in FORMS:
        raise BadOption(f"{form!r} is no form", hint=f"There are {', '.join(kind.__name__ for kind in FORMS)}")
    if symmetry not in SYMMETRIES:
        raise BadOption(f"there is no symmetry {symmetry!r}", hint=f"There are {', '.join(SYMMETRIES)}")
    by_degree = symmetry == DEGREE_SCALING
    if by_degree and act.degree is None:
        raise BadOption(f"{act.name} has no degree", hint="It is homogeneous of none")
    if form is not GatedMLP:
        if not by_degree:
            return True, "s acts on the product, which the operation leaves as it is"
        # the product becomes c^(1 - p) times itself
        return act.degree in (0.0, 1.0), f"s(z c^(1 - p)) = s(z) needs p = 0 or 1, and p is {act.degree:g}"
    if symmetry == "exchange":
        return act.linear, f"s(z)/z is {'constant' if act.linear else 'not constant'}"
    if by_degree:
        return True, f"s(c z) = c^p s(z) with p = {act.degree:g}"
    if symmetry == SIGN_CHANGE:
        return act.odd, f"s is {'odd' if act.odd else 'not odd'}"
    if act.degree == 1.0:
        return True, "s is positively homogeneous: s(c z) = c s(z)"
    return False, (
        f"s is homogeneous of degree {act.degree:g}, not 1" if act.degree is not None else "s is not homogeneous"
    )


SIGN_CHANGE = "scaling c=-1"
DEGREE_SCALING = "scaling c=2, k/c^p"
SYMMETRIES: dict[str, Callable[[MLPForm], MLPForm]] = {
    "exchange": exchange,
    "scaling c=2": lambda form: rescale(form, 2.0),
    SIGN_CHANGE: lambda form: rescale(form, -1.0),
    DEGREE_SCALING: lambda form: rescale(form, 2.0, degree=form.activation.degree),  # type: ignore[arg-type]  # None is refused
}


def symmetry_table(
    *, d_model: int = 16, d_mlp: int = 24, rank: int = 2, samples: int = 64, seed: int = 0
) -> pd.DataFrame:
    """Every form with every nonlinearity under every symmetry: what was measured, and what the theory says.

    Args:
        d_model, d_mlp, rank: sizes of the random forms.
        samples: Gaussian inputs.
        seed: of forms and inputs.

    Returns:
        Frame with a row per form, activation and symmetry: form, activation, symmetry, gap (see `symmetry_gap`), kept
        (the gap is rounding), paper ("keeps" or "breaks"), because. `scaling c=2, k/c^p` only where s has a degree
        p other than 1; it is not the paper's, but says what such an s keeps instead. About a second.

    Raises:
        BadOption: a size, the number of samples or the seed is out of range.
    """
    import pandas as pd

    generator = torch.Generator().manual_seed(whole_number("seed", seed, 0))
    samples = whole_number("samples", samples, 1)
    x = torch.randn(samples, d_model, generator=generator, dtype=torch.float64)
    rows = []
    for kind in FORMS:
        extra: dict[str, Any] = {"rank": rank} if kind is BilinearAttentionMLP else {}
        for name in TABLE_ACTIVATIONS:
            # by way of meta: the constructor's own draw would move the global generator
            form = kind(d_model, d_mlp, name, **extra, device="meta", dtype=torch.float64).to_empty(device="cpu")
            form.reset_parameters(generator)
            for symmetry, operation in SYMMETRIES.items():
                if symmetry == DEGREE_SCALING and form.activation.degree in (None, 1.0):
                    continue
                keeps, because = verdict(kind, name, symmetry)
                gap = symmetry_gap(form, operation, x)
                rows.append(
                    {
                        "form": kind.__name__,
                        "activation": name,
                        "symmetry": symmetry,
                        "gap": gap,
                        "kept": gap < _ROUNDING,
                        "paper": "keeps" if keeps else "breaks",
                        "because": because,
                    }
                )
    return pd.DataFrame(rows)
