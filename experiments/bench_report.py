"""What a benchmark says: final success, who beats the baseline, what it cost, with intervals over seeds.

The statistics are those of Agarwal et al. (2021, arXiv:2108.13264): interquartile mean, probability of improvement,
and percentile bootstrap intervals that draw seeds again, within each environment where several are pooled. They stand
on ``scipy.stats`` (``trim_mean``, ``bootstrap``), which JAX depends on already. The authors' own ``rliable`` (1.2.0,
2024) was not taken: it admits no current ``arch``, brings pandas, statsmodels and seaborn, and draws from NumPy's
global generator whatever seed it is given, so that no table could be made twice.

A percentile interval over a handful of seeds is too narrow: with four of them, of normal scores, one for 95 % holds the
truth in 88 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from agentrl_jax.intervals import Interval, bootstrap, bootstrap_band, iqm, probability_of_improvement

RESAMPLES = 2000


class Outcome(NamedTuple):
    """A method in an environment, over seeds ``S`` and evaluations ``E``, the start's first.

    Attributes:
      arena, label: what was played, by whom.
      evals: ``{name: [S, E]}``: greedy, reward, length, written, turns, entropy, kl_start, used, step.
      passes: ``{k: [S, E]}``, pass@k of the sampled tries.
      steps: metrics of every step, one dict of lists a seed.
      budget: tokens of a run.
      seconds: wall time of the pair: wait (for the compiler), train, evaluate; beside them compile, in the background.
      note: what is to be said of the environment's tasks.
      agreement: mean cosine of the first gradients of the seeds; None with one seed or a critic.
    """

    arena: str
    label: str
    evals: dict[str, np.ndarray]
    passes: dict[int, np.ndarray]
    steps: tuple[dict[str, list], ...]
    budget: int
    seconds: dict[str, float]
    note: str = ""
    agreement: float | None = None

    @property
    def success(self) -> np.ndarray:
        """Held-out success of sampled tries, ``[S, E]``."""
        return self.passes[1]

    @property
    def final(self) -> np.ndarray:
        """At the end, ``[S]``."""
        return self.success[:, -1]


def outcomes(result: Mapping[str, Any]) -> list[Outcome]:
    """The groups of a finished pair."""
    found = []
    for group in result["groups"]:
        rows = [seed["evals"] for seed in group["seeds"]]
        names = [name for name in rows[0][0] if name != "pass"]
        evals = {name: np.array([[e[name] for e in seed] for seed in rows], np.float64) for name in names}
        passes = {int(k): np.array([[e["pass"][k] for e in seed] for seed in rows]) for k in rows[0][0]["pass"]}
        steps = tuple(seed["steps"] for seed in group["seeds"])
        about = result["budget"], result["seconds"], result["note"], group["agreement"]
        found.append(Outcome(result["arena"], group["label"], evals, passes, steps, *about))
    return found


def tokens_to_bar(used: Sequence[float], success: Sequence[float], bar: float) -> float:
    """Tokens at which a curve of evaluations first reaches the bar, on straight lines between them; inf if never."""
    for i, value in enumerate(success):
        if value >= bar:
            if i == 0:
                return 0.0
            share = (bar - success[i - 1]) / (value - success[i - 1])
            return float(used[i - 1] + share * (used[i] - used[i - 1]))
    return math.inf


def at_bar(outcome: Outcome, bar: float) -> dict[str, Any]:
    """Median tokens to the bar over all seeds (None: the median run does not get there) and how many reach it."""
    found = [tokens_to_bar(*curve, bar) for curve in zip(outcome.evals["used"], outcome.success, strict=True)]
    middle = sorted(found)[(len(found) - 1) // 2 : len(found) // 2 + 1]
    median = float(np.mean(middle)) if math.isfinite(middle[-1]) else None
    return {"median": median, "reached": sum(map(math.isfinite, found)), "seeds": len(found)}


def summary(outcome: Outcome, baseline: Outcome | None, bar: float) -> dict[str, Any]:
    """A row of the table; intervals are ``[estimate, low, high]``."""
    final = outcome.final
    better = None
    if baseline is not None and baseline.label != outcome.label:
        better = probability_of_improvement(final, baseline.final, resamples=RESAMPLES)
    return {
        "method": outcome.label, "seeds": len(final), "finals": final.tolist(),
        "iqm": bootstrap(final, iqm, resamples=RESAMPLES), "mean": bootstrap(final, np.mean, resamples=RESAMPLES),
        "greedy": float(outcome.evals["greedy"][:, -1].mean()), "better": better, "to_bar": at_bar(outcome, bar),
        "pass": {k: float(x[:, -1].mean()) for k, x in outcome.passes.items()},
        **{name: float(outcome.evals[name][:, -1].mean()) for name in ("entropy", "length", "written", "kl_start")},
        "written_by": {kind: _among(outcome, f"written_{kind}") for kind in ("solved", "failed")},
        "agreement": outcome.agreement, "zero_variance": _over_run(outcome, "zero_variance"),
        "steps": float(outcome.evals["step"][:, -1].mean()),
        "tokens": float(outcome.evals["used"][:, -1].mean()), "complete": bool(
            np.all(outcome.evals["used"][:, -1] >= outcome.budget)
        ),
        "seconds": {**outcome.seconds, "all": sum(outcome.seconds[name] for name in ("wait", "train", "evaluate"))},
    }  # fmt: skip


def _among(outcome: Outcome, name: str) -> float | None:
    """Mean over the seeds that have the number at the end."""
    last = outcome.evals[name][:, -1]
    return float(np.mean(last[np.isfinite(last)])) if np.any(np.isfinite(last)) else None


def _over_run(outcome: Outcome, name: str) -> float | None:
    """Mean of a metric over all steps of all seeds; None where no step has it."""
    values = [value for seed in outcome.steps for value in seed.get(name, ()) if value is not None]
    return float(np.mean(values)) if values else None


def pooled(found: Sequence[Outcome], baselines: Sequence[Outcome | None]) -> dict[str, Any]:
    """A method over several environments: interquartile mean of all final successes, mean P(better)."""
    finals = [outcome.final for outcome in found]
    better = None
    if all(base is not None and base.label != outcome.label for outcome, base in zip(found, baselines, strict=True)):
        others = [base.final for base in baselines if base is not None]
        better = stratified(_improvement, [*finals, *others])
    return {"method": found[0].label, "iqm": stratified(_pooled_iqm, finals), "better": better}


def stratified(statistic: Any, samples: Sequence[np.ndarray]) -> Interval:
    """``statistic(*samples, axis=-1)`` with a percentile bootstrap interval: every sample is drawn again by itself."""
    from scipy.stats import bootstrap as resample

    estimate = float(statistic(*samples, axis=-1))
    if all(len(x) == 1 for x in samples):
        return Interval(estimate, estimate, estimate)
    # A single seed cannot be drawn again; twice the same one is, and stays what it is.
    samples = [np.repeat(x, 2) if len(x) == 1 else x for x in samples]
    drawn = resample(
        samples, statistic, n_resamples=RESAMPLES, method="percentile", vectorized=True, paired=False,
        rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return Interval(estimate, float(drawn.low), float(drawn.high))


def _pooled_iqm(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
    return iqm(np.concatenate(samples, axis=axis), axis=axis)


def _improvement(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
    """Mean over environments of ``P(X > Y) + P(X = Y) / 2``; the first half of the samples are the method's."""
    half = len(samples) // 2
    wins = [(np.sign(x[..., :, None] - y[..., None, :]) + 1) / 2 for x, y in zip(samples[:half], samples[half:])]  # noqa: B905
    return np.mean([w.mean(axis=(-2, -1)) for w in wins], axis=0)


def curve(outcome: Outcome, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """``(tokens, interquartile mean, low, high)`` over seeds of an evaluation's number, or of ``pass_1``."""
    values = outcome.success if name == "pass_1" else outcome.evals[name]
    return outcome.evals["used"].mean(0), *bootstrap_band(values, iqm, resamples=RESAMPLES)


def report(
    found: Sequence[Outcome],
    others: Sequence[Mapping[str, Any]],
    *,
    baseline: str,
    bar: float,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """All numbers, environment by environment; ``others`` are pairs that failed or do not apply."""
    arenas: dict[str, list[Outcome]] = {}
    for outcome in found:
        arenas.setdefault(outcome.arena, []).append(outcome)
    bases = {arena: next((o for o in rows if o.label == baseline), None) for arena, rows in arenas.items()}
    body = {}
    for arena, rows in arenas.items():
        start = {name: float(x[0, 0]) for name, x in rows[0].evals.items() if name not in ("used", "step")}
        start["pass"] = {k: float(x[0, 0]) for k, x in rows[0].passes.items()}
        body[arena] = {
            "note": rows[0].note,
            "start": start,
            "methods": [summary(outcome, bases[arena], bar) for outcome in rows],
        }
    everywhere = [o.label for o in found if len(arenas) > 1 and sum(x.label == o.label for x in found) == len(arenas)]
    overall = [
        pooled([o for o in found if o.label == label], [bases[o.arena] for o in found if o.label == label])
        for label in dict.fromkeys(everywhere)
    ]
    kept = [{name: pair[name] for name in ("status", "method", "arena", "reason")} for pair in others]
    return {**about, "baseline": baseline, "bar": bar, "environments": body, "overall": overall, "others": kept}


def markdown(numbers: Mapping[str, Any]) -> str:
    """The report as tables to read."""
    lines = ["# Benchmark", "", f"    {numbers['command']}", ""]
    lines += [
        "Success is that of sampled tries on held-out tasks at the end of the budget, in percent: interquartile mean "
        "over seeds with a 95 % percentile bootstrap interval (narrow for few seeds). P(better): the probability that "
        f"a run ends higher than one of `{numbers['baseline']}`, ties counting half. To the bar: median tokens until "
        f"held-out success is {numbers['bar']:.0%}, and the runs that reach it. Entropy and KL are in nats per token "
        "at the end, KL against the weights all began from; length in tokens per episode, and written of them by the "
        "agent in tries that solved the task and that failed; same reward: share of training groups whose members were "
        "all paid alike, over the run; agreement: mean cosine of the seeds' first gradients, 1 without noise, none "
        "with a critic.",
    ]
    for arena, body in numbers["environments"].items():
        start = body["start"]
        rates = ", ".join(f"pass@{k} {_percent(value)}" for k, value in start["pass"].items())
        lines += [
            "",
            f"## {arena}",
            "",
            f"Start: {rates}, greedy {_percent(start['greedy'])}. {body['note']}".rstrip(),
            "",
        ]
        lines += _table(_COLUMNS, [_row(row) for row in body["methods"]])
        if not all(row["complete"] for row in body["methods"]):
            lines += ["", "Runs marked * ended at the limit of steps, below their budget."]
    if numbers["overall"]:
        lines += ["", "## All environments", ""]
        lines += _table(
            ("method", "success [95 %]", "P(better) [95 %]"),
            [(row["method"], _interval(row["iqm"]), _interval(row["better"], "")) for row in numbers["overall"]],
        )
    if numbers["others"]:
        lines += ["", "## Not in the tables", ""]
        lines += [f"- {x['method']} on {x['arena']}: {x['status']}: {x['reason']}" for x in numbers["others"]]
    return "\n".join(lines) + "\n"


_COLUMNS = (
    "method", "success [95 %]", "mean", "greedy", "P(better) [95 %]", "to the bar", "entropy", "KL", "length",
    "written: solved", "failed", "same reward", "agreement", "steps", "wall s",
)  # fmt: skip


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    share = row["zero_variance"]
    return (
        row["method"] + ("" if row["complete"] else " *"), _interval(row["iqm"]), _percent(row["mean"][0]),
        _percent(row["greedy"]), _interval(row["better"], ""), _cost(row["to_bar"]), f"{row['entropy']:.3f}",
        f"{row['kl_start']:.3f}", f"{row['length']:.1f}", *(_or_dash(x, "{:.1f}") for x in row["written_by"].values()),
        "-" if share is None else _percent(share), _or_dash(row["agreement"], "{:.2f}"), f"{row['steps']:.0f}",
        f"{row['seconds']['all']:.0f}",
    )  # fmt: skip


def _cost(found: Mapping[str, Any]) -> str:
    middle = "-" if found["median"] is None else f"{found['median'] / 1000:.0f}k"
    return f"{middle} ({found['reached']}/{found['seeds']})"


def _or_dash(x: float | None, form: str) -> str:
    return "-" if x is None else form.format(x)


def _percent(x: float) -> str:
    return f"{100 * x:.1f}"


def _interval(x: Sequence[float] | None, unit: str = "%") -> str:
    if x is None:
        return "-"
    form = _percent if unit else "{:.2f}".format
    return f"{form(x[0])} [{form(x[1])}, {form(x[2])}]"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
