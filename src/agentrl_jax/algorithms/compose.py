"""Any advantage, ratio, clip, aggregation, KL, filter and way of collecting, by keyword: one ``Algorithm``.

A name stands for a function that makes a ``Part`` (``KINDS``) or for a row of ``surrogates.SURROGATES``. The static
keywords and the numbers of what is chosen are keywords of ``compose`` too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from agentrl_jax import filters, objectives, parts, replay, rewards, stages
from agentrl_jax.algorithm import Algorithm, TrainState, keep_state
from agentrl_jax.algorithms.finishing import FINISH
from agentrl_jax.algorithms.fit import check_fit, check_options
from agentrl_jax.algorithms.ingredients import (
    KINDS,
    Choice,
    Maker,
    call,
    check_given,
    check_static,
    keywords_of,
)
from agentrl_jax.checks import check_choice, check_numbers
from agentrl_jax.kl import ESTIMATORS
from agentrl_jax.parts import Part
from agentrl_jax.surrogates import IMITATIONS, surrogate
from agentrl_jax.types import Array, Metrics


def compose(
    name: str = "custom",
    *,
    collect: str | None = None,
    reward: tuple[str, ...] = (),
    filters: tuple[str, ...] = (),
    advantage: str = "group",
    shaping: tuple[str, ...] = (),
    tokens: tuple[str, ...] = (),
    replay: str | None = None,
    ratio: str = "token",
    clip: str = "ppo",
    aggregation: str = "token-mean",
    norm: float | None = None,
    correction: str | None = None,
    offpolicy_mask: bool = False,
    imitation: str | None = None,
    kl: str | None = None,
    kl_in: str = "loss",
    kl_corrected: bool = False,
    perception: bool = False,
    finish: tuple[str, ...] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Algorithm:
    """An algorithm out of named ingredients; ``choices()`` lists the names.

    A keyword that takes several names takes a tuple, or one string with commas.

    Args:
      name: what results are filed under.
      collect: where episodes come from; None: one rollout of fresh tasks in equal groups.
      reward: what is paid besides the environment's reward.
      filters: what is dropped, or re-drawn, before the advantage.
      advantage: who earned it. With ``lambda_critic`` the targets of "gae" have a lambda of their own (VC-PPO).
      shaping: what is done to advantages afterwards.
      tokens: which tokens learn less.
      replay: what is stored and used again.
      ratio, clip: the policy loss, see ``surrogates.SURROGATES``.
      aggregation, norm: how tokens add up, see ``masked.aggregation_weights``.
      correction: for a sampler that is not the trainer, see ``filters.CORRECTIONS``; with ``normalise_weights=True``
        its weights have a mean of 1 over the batch, with ``veto=True`` episodes with a token whose ratio is below
        ``veto_floor`` get weight 0.
      offpolicy_mask: silences rows with a negative advantage whose tokens have become less likely than when they were
        sampled, by more than ``offpolicy_delta`` nats in the mean.
      imitation: a term on expert or correct text, see ``surrogates.IMITATIONS``.
      kl: estimator of the divergence from the reference policy. A positive ``kl_coef`` alone means k3 in the loss, k1
        in the reward; ``kl_coef=0`` means none.
      kl_in: "loss" (``+ kl_coef k``) or "reward" (``- kl_coef k`` on every token).
      kl_corrected: ``+ kl_coef (pi / pi_old) k`` in the loss: the divergence of the policy as it is now, and for k1 and
        k3 its gradient, after the first update too (DeepSeek-V3.2).
      perception: PAPO's term, the divergence from what the policy says with masked observations.
      finish: what follows an update, see ``finishing.FINISH``.
      defaults: options that hold where an ingredient reads them, and are passed over where none does.
      **options: static keywords and numbers of the chosen ingredients (``eps_high=.28``, ``k=4``, ``kl_coef=.01``).

    Raises:
      ValueError: an unknown name or option, with what there is; ingredients that do not go together, with the reason.
    """
    named = {
        "collect": collect, "reward": reward, "filters": filters, "advantage": advantage, "shaping": shaping,
        "tokens": tokens, "replay": replay,
    }  # fmt: skip
    _check_own(name, aggregation, norm, kl_in, finish)
    _check_switches(name, offpolicy_mask=offpolicy_mask, kl_corrected=kl_corrected)
    off = "kl_coef" in options
    kl, options = _divergence(kl, kl_in, options)
    off = off and kl is None
    choice = Choice(
        makers=tuple(maker for kind, value in named.items() for maker in _pick(kind, value)),
        loss=surrogate(ratio, clip),
        imitation=None if imitation is None else _known("imitation", imitation, IMITATIONS),
        kl=kl, kl_in=kl_in, kl_corrected=kl_corrected, kl_off=off, correction=correction, perception=perception,
        offpolicy_mask=offpolicy_mask, aggregation=aggregation, finish=_names(finish),
    )  # fmt: skip
    check_fit(choice, ratio)
    check_options(choice, options, dict(defaults) | options)
    return _assemble(name, choice, norm, dict(defaults), options)


def _check_own(
    name: str, aggregation: str, norm: float | None, kl_in: str, finish: str | tuple[str, ...] | None
) -> None:
    """Refuses values of ``compose``'s own keywords that no table looks up."""
    if not isinstance(aggregation, str):
        raise ValueError(f"{name}: aggregation must be of type str, got {aggregation!r}")
    check_numbers({} if norm is None else {"norm": norm})
    check_choice("kl_in", kl_in, ("loss", "reward"))
    for key in _names(finish):
        check_choice("finish", key, tuple(FINISH))


def _check_switches(name: str, **switches: Any) -> None:
    """A string such as ``"no"`` would be true."""
    for key, value in switches.items():
        if type(value) is not bool:
            raise ValueError(f"{name}: {key} must be of type bool, got {value!r}")


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """One name, several with commas between, or a tuple of them; "none" and None for none at all."""
    if value is None or value == "none":
        return ()
    return tuple(value.split(",")) if isinstance(value, str) else tuple(value)


def _divergence(kl: str | None, kl_in: str, options: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The estimator; a coefficient without one asks for the usual, and a coefficient of 0 for no reference at all."""
    if kl is not None:
        check_choice("kl", kl, ESTIMATORS)
    if "kl_coef" not in options:
        return kl, options
    coef = options["kl_coef"]
    check_numbers({"kl_coef": coef})
    if not coef > 0:
        return None, {k: v for k, v in options.items() if k != "kl_coef"}
    return kl or ("k3" if kl_in == "loss" else "k1"), options


def _known(kind: str, name: str, table: dict[str, Any]) -> Any:
    check_choice(kind, name, tuple(table))
    return table[name]


def _pick(kind: str, value: str | tuple[str, ...] | None) -> Iterable[Maker]:
    """The makers a keyword names; one name stands for a tuple of one."""
    names = _names(value)
    if kind in ("collect", "advantage", "replay") and len(names) > 1:
        raise ValueError(f"{kind} takes one name, got {', '.join(names)}")
    if kind == "advantage" and not names:
        raise ValueError(f"advantage needs a name: {', '.join(KINDS[kind])}")
    return [_known(kind, name, KINDS[kind]) for name in names]


def _assemble(
    name: str, choice: Choice, norm: float | None, defaults: dict[str, Any], options: dict[str, Any]
) -> Algorithm:
    extra = _implied(choice)
    keywords = keywords_of((*choice.makers, *extra))
    static = {key: value for key, value in (defaults | options).items() if key in keywords}
    check_static(name, keywords, static)
    implied = {"correction": choice.correction, "kl_estimator": choice.kl}
    static |= {key: value for key, value in implied.items() if key in keywords}
    check_given(name, (*choice.makers, *extra), static)
    made = [call(maker, static) for maker in _in_order(choice.makers, extra)]
    joined = parts.join(_scored(made, choice), teacher=choice.imitation is not None and choice.imitation.expert)
    if "critic" in joined.needs and replay.replay in choice.makers:
        raise ValueError("replayed episodes carry no values: replay does not go with a critic's advantage")
    needs = set(joined.needs - {"scores"}) | {need for key in choice.finish for need in FINISH[key].needs}
    needs |= {"single"} if choice.loss.single else set()
    needs |= {"one_segment"} if choice.loss.sequence or choice.offpolicy_mask else set()
    hyper = _numbers(choice, joined.hyper, needs)
    hyper |= {key: value for key, value in defaults.items() if key in hyper}
    given = {key: value for key, value in options.items() if key not in keywords}
    hyper = override(name, hyper, given, (*inspect.signature(compose).parameters, *keywords))
    if "anneal_imitation" in choice.finish and "mu" not in given:
        # The schedule sets the share of every later step; this is its value at the first.
        hyper["mu"] = hyper["mu_peak"] / max(hyper["mu_warmup"], 1.0)
    return Algorithm(
        name=name,
        prepare=joined.prepare,
        weigh=objectives.weigh_tokens(choice.aggregation, norm=norm, imitation=choice.imitation),
        loss=objectives.token_objective(
            choice.loss.surrogate, kl=choice.kl if choice.kl_in == "loss" else None, critic="critic" in needs,
            imitation=choice.imitation, perception=choice.perception, clips=choice.loss.clips,
            kl_corrected=choice.kl_corrected, offpolicy=choice.offpolicy_mask,
        ),
        hyper=hyper,
        needs=frozenset(needs),
        init=joined.init,
        collect=joined.collect,
        finish=_finisher(choice.finish),
    )  # fmt: skip


def _implied(choice: Choice) -> tuple[Maker, ...]:
    """Parts that other choices ask for."""
    found: list[Maker] = []
    if choice.kl is not None and choice.kl_in == "reward":
        found.append(rewards.kl_penalty)
    if choice.correction is not None:
        found.append(filters.behaviour_correction)
    if choice.imitation is not None and choice.imitation.kind == "add":
        found.append(filters.mark_correct)
    if choice.perception:
        found.append(filters.masked_observations)
    return tuple(found)


def _in_order(makers: tuple[Maker, ...], extra: tuple[Maker, ...]) -> list[Maker]:
    """The environment's reward is scaled before the penalty, and the penalty comes before every other reward; what
    marks and re-weighs tokens after the advantage, before replay."""
    scale = [maker for maker in makers if maker is rewards.running_scale]
    first = [*scale, *(maker for maker in extra if maker is rewards.kl_penalty)]
    last = [maker for maker in makers if maker is replay.replay]
    rest = [maker for maker in (*makers, *extra) if maker not in (*first, *last)]
    return [*first, *rest, *last]


def _scored(made: list[Part], choice: Choice) -> list[Part]:
    """Scoring in front of everything that reads it."""
    always = any("scores" in part.needs for part in made)
    score = [Part("scores", stages.score_policy(always=always))]
    if choice.kl is not None:
        score.append(Part("reference_scores", stages.score_reference(), needs=frozenset({"reference"})))
    return [*score, *made]


def _numbers(choice: Choice, hyper: dict[str, float], needs: set[str]) -> dict[str, float]:
    """Every number of the ingredients, with its default."""
    hyper = {**hyper, **choice.loss.hyper, "entropy_coef": 0.0}
    if choice.imitation is not None:
        hyper |= choice.imitation.hyper
    if choice.kl is not None:
        hyper = {"kl_coef": 0.01} | hyper
    if choice.perception:
        hyper |= {"perception_coef": 0.01, "perception_max": 10.0}
    if choice.offpolicy_mask:
        hyper |= {"offpolicy_delta": 0.5}
    if "critic" in needs:
        hyper |= {"value_coef": 0.5, "value_eps": 0.2}
    for key in choice.finish:
        hyper |= FINISH[key].hyper
    return hyper


def override(name: str, hyper: dict[str, float], given: dict[str, Any], others: tuple[str, ...]) -> dict[str, float]:
    """``hyper`` with the caller's numbers in their place.

    Raises:
      ValueError: a name that is no number of this algorithm, with everything that is an option of it (``others`` are
        its other keywords); a value that is out of range.
    """
    unknown = sorted(set(given) - set(hyper))
    if unknown:
        every = [key for key in (*hyper, *others) if key not in ("name", "options", "defaults")]
        raise ValueError(f"{name} has no option {unknown}; it has: {', '.join(dict.fromkeys(every))}")
    check_numbers(given)
    return {**hyper, **given}


def _finisher(names: tuple[str, ...]) -> Callable[[TrainState, Metrics, dict[str, Array]], TrainState]:
    if not names:
        return keep_state

    def finish(state: TrainState, metrics: Metrics, hyper: dict[str, Array]) -> TrainState:
        for name in names:
            state = FINISH[name].apply(state, metrics, hyper)
        return state

    return finish
