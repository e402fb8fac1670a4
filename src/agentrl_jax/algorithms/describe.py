"""What a preset is made of, in words: for a reader, and for the page that lists them all."""

from __future__ import annotations

import inspect
from typing import Any

from agentrl_jax.algorithm import Algorithm
from agentrl_jax.algorithms.compose import compose
from agentrl_jax.algorithms.finishing import FINISH
from agentrl_jax.algorithms.ingredients import KINDS
from agentrl_jax.algorithms.preferences import PAIRS, RULES, prefer, unpaired
from agentrl_jax.algorithms.presets import PRESETS, Preset, make, preset
from agentrl_jax.surrogates import IMITATIONS, SURROGATES


def describe(name: str) -> str:
    """Paper, source, ingredients with their rules, numbers, needs, and what deviates from the paper.

    Raises:
      ValueError: an unknown preset, with those there are.
    """
    found = preset(name)
    algorithm = make(name)
    rows = [f"{name}: {found.title}", f"  source       {found.source}"]
    rows += [f"  {kind:<12} {text}" for kind, text in ingredients(found)]
    rows.append(f"  {'numbers':<12} {_numbers(algorithm)}")
    rows.append(f"  {'needs':<12} {', '.join(sorted(algorithm.needs)) or 'nothing'}")
    rows += [f"  {label:<12} {text}" for label, text in _remarks(found)]
    return "\n".join(rows)


def catalogue() -> str:
    """The page of all presets, in Markdown."""
    lines = [
        "# Algorithms",
        "",
        "Written by `agentrl_jax.algorithms.catalogue()`; a test keeps it in step. `algorithms.make(NAME)` builds one, "
        "`algorithms.describe(NAME)` prints its entry, and the keywords of `algorithms.compose` change its parts.",
        "",
        "| name | paper | source | status |",
        "|---|---|---|---|",
    ]
    for name, p in PRESETS.items():
        status = "deviates, see there" if p.deviates else "as published"
        lines.append(f"| [`{name}`](#{name}) | {p.title} | {p.source} | {status} |")
    for name, found in PRESETS.items():
        algorithm = make(name)
        lines += ["", f"## {name}", "", f"{found.title}. {found.source}."]
        lines += ["", *(f"- {kind}: {text}" for kind, text in ingredients(found))]
        lines += [f"- numbers: {_numbers(algorithm)}", f"- needs: {', '.join(sorted(algorithm.needs)) or 'nothing'}"]
        lines += [f"- {label}: {text}" for label, text in _remarks(found)]
    return "\n".join(lines) + "\n"


def _remarks(found: Preset) -> list[tuple[str, str]]:
    return [(label, text) for label, text in (("about", found.about), ("deviates", found.deviates)) if text]


def _numbers(algorithm: Algorithm) -> str:
    return ", ".join(f"{key} = {value:g}" for key, value in sorted(algorithm.hyper.items())) or "none"


def ingredients(found: Preset) -> list[tuple[str, str]]:
    """``(kind, "name: rule")`` of everything a preset is made of that is not the plain default."""
    if found.build is prefer:
        return _preference(found.options)
    if found.build is unpaired:
        return [
            ("loss", "KTO: w_D (1 - sigmoid(beta (u - z))) or w_U (1 - sigmoid(beta (z - u))), one episode at a time")
        ]
    if found.build is not compose:
        return [("loss", "-log pi of the expert's tokens, observations masked")]
    return _composed(found.options)


def _preference(options: dict[str, Any]) -> list[tuple[str, str]]:
    loss, pairs = options.get("loss", "dpo"), options.get("pairs", "best_against_worst")
    return [("pairs", f"{pairs}: {_first_line(PAIRS[pairs])}"), ("loss", f"{loss}: {RULES[loss].rule}")]


def _composed(options: dict[str, Any]) -> list[tuple[str, str]]:
    signature = inspect.signature(compose).parameters
    value = lambda key: options.get(key, signature[key].default)  # noqa: E731
    rows = []
    for kind, makers in KINDS.items():
        rows += [(kind, f"{name}: {_first_line(makers[name])}") for name in _tuple(value(kind))]
    ratio, clip = value("ratio"), value("clip")
    rows.append(("loss", f"ratio {ratio}, clip {clip}: {SURROGATES[ratio, clip].rule}"))
    rows.append(("aggregation", value("aggregation")))
    if value("imitation"):
        rows.append(("imitation", f"{value('imitation')}: {IMITATIONS[value('imitation')].rule}"))
    if value("correction"):
        rows.append(("correction", f"{value('correction')}: pi_old / pi_behaviour, bounded"))
    if value("offpolicy_mask"):
        rows.append(
            ("off policy", "sequences with A < 0 and a mean log pi_behaviour / pi > offpolicy_delta are silent")
        )
    if value("kl"):
        corrected = ", times pi / pi_old" if value("kl_corrected") else ""
        rows.append(("kl", f"{value('kl')} against the reference, in the {value('kl_in')}{corrected}"))
    if value("perception"):
        rows.append(("perception", "- perception_coef k3 against the policy's own words with masked observations"))
    rows += [("finish", f"{name}: {_first_line(FINISH[name].apply)}") for name in value("finish")]
    static = _static([m[name] for kind, m in KINDS.items() for name in _tuple(value(kind))], options)
    return rows + ([("options", static)] if static else [])


def _tuple(names: Any) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _static(makers: list[Any], options: dict[str, Any]) -> str:
    """The static keywords of the makers, as the preset has them."""
    found = {key: p.default for maker in makers for key, p in inspect.signature(maker).parameters.items()}
    found |= {key: value for key, value in options.items() if key in found or key == "norm"}
    return ", ".join(f"{key} = {value}" for key, value in found.items())


def _first_line(function: Any) -> str:
    """The first sentence of a docstring, on one line."""
    text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    return text.removesuffix(".")
