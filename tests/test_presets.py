"""Presets by name: each resolves, says what it is, takes one whole step, and refuses what it cannot do."""

import functools
import inspect
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from quiz import ENV, fluent
from tiny import CODEC, POLICY

from agentrl_jax import TrainConfig, UpdateConfig, algorithms, envs, make_hyper, make_init, make_step, metrics, train
from agentrl_jax.algorithms.ingredients import KINDS

NAMES = algorithms.names()
SURVEY = (
    "reinforce reinforce_plus_plus reinforce_plus_plus_baseline rloo remax ppo vapo lite_ppo pf_ppo vine_ppo "
    "online_dpo beta_dpo simpo ipo kto orpo step_dpo sdpo lcpo grpo dapo luffy gspo gmpo pro_rl posterior_grpo dr_grpo "
    "step_grpo greso starpo starpo_s ghpo srpo skywork_ssb aspo tree_po edge_grpo arpo dars chord papo pass_at_k "
    "ktae cispo sapo gigpo turn_grpo bilevel_ppo awr raft"
).split()
SMALL = {"pool": 8, "capacity": 8, "roots": 2, "k": 2, "rolls": 2, "rounds": 2}


@functools.cache
def world(name):
    return envs.noisy_reward(ENV) if "parts:exact_reward" in algorithms.make(name).needs else ENV


def small(name):
    """The preset with its static sizes at their smallest."""
    found = algorithms.PRESETS[name]
    options = {}
    for key, value in SMALL.items():
        try:
            algorithms.make(name, **{**options, key: value})
        except ValueError:
            continue
        options[key] = value
    assert found.build is not None
    return algorithms.make(name, **options)


CORE = {
    "reward", "success", "turns", "length", "written", "truncated", "cut_actions", "tokens", "entropy", "loss",
    "loss_tokens", "kl_old", "max_logp_gap", "grad_norm", "skipped_updates", "learning_rate", "logp", "thinking",
}  # fmt: skip
# Where the step that all others take teaches nothing: lcpo asks for a group of right answers of different lengths.
KEYS = {"lcpo": 0}
CONFIG = TrainConfig(episodes=8, group_size=4, slots=8, max_tokens=20, update=UpdateConfig(optimizer="sgd"))


def test_every_method_of_the_survey_has_its_preset():
    assert not set(SURVEY) - set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_says_what_it_is(name):
    found, text = algorithms.PRESETS[name], algorithms.describe(name)
    assert text.startswith(f"{name}: {found.title}") and found.source in text
    assert re.search(r"(arXiv|1988|1992)", found.source), found.source
    algorithm = algorithms.make(name)
    assert algorithm.name == name and all(f"{number} = " in text for number in algorithm.hyper)
    assert all(need in text for need in algorithm.needs)
    hash((algorithm.prepare, algorithm.loss, algorithm.weigh))


def test_the_page_of_algorithms_is_in_step():
    page = Path(__file__).parents[1] / "docs" / "algorithms.md"
    if not page.exists():
        pytest.skip("only in the repository")
    assert page.read_text() == algorithms.catalogue(), "write docs/algorithms.md anew: algorithms.catalogue()"


# Written from the cards, not from the library. A row: advantage, (ratio, clip), aggregation, what else it is composed
# of, what it needs, and every number it reads. Where a card leaves something open, or a preset says that it deviates
# (no divergence, the constant width of Dr.GRPO, DAPO's buffer, scaled to short episodes), the row says what is here.
TOKENS, ROWS, SUM, WIDTH = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
PLAIN, CLIP, GROUP = ("none", "none"), ("token", "ppo"), {"group"}
EVEN, HIGHER = {"eps_low": 0.2, "eps_high": 0.2}, {"eps_low": 0.2, "eps_high": 0.28}
STD = {"scale": "std", "ddof": 1, "eps": 1e-6}
CENTRED, BATCH = STD | {"scale": "none"}, STD | {"scale": "batch"}
WHITE = {"shaping": ("whiten",), "whiten_ddof": 1}
CRITIC = {"discount": 1.0, "value_coef": 0.5, "value_eps": 0.2}
COV = {"cov_fraction": 2e-4}
COMPOSED = {
    "reinforce": ("returns", PLAIN, SUM, {"baseline": "ema"}, {"single"}, {"discount": 1.0}),
    "reinforce_plus_plus": (
        "returns", CLIP, TOKENS, WHITE | {"baseline": "none", "kl": "k1", "kl_in": "reward"}, {"reference"},
        EVEN | {"discount": 1.0, "kl_coef": 0.01},
    ),
    "reinforce_plus_plus_baseline": (
        "group", CLIP, TOKENS, CENTRED | WHITE | {"kl": "k2"}, GROUP | {"reference"}, EVEN | {"kl_coef": 0.01}
    ),
    "rloo": ("leave_one_out", PLAIN, SUM, {"kl_in": "reward"}, GROUP | {"single"}, {}),
    "remax": ("subtract_baseline", PLAIN, TOKENS, {"collect": "greedy_baseline"}, {"single"}, {}),
    "opo": ("length_weighted", PLAIN, TOKENS, {}, GROUP | {"single"}, {}),
    "gpg": ("gpg", PLAIN, TOKENS, {}, GROUP | {"single"}, {}),
    "awr": (
        "group", ("none", "exponential"), TOKENS, CENTRED, GROUP | {"single"}, {"awr_beta": 0.5, "weight_max": 20.0}
    ),
    "ppo": ("gae", CLIP, TOKENS, WHITE | {"kl_in": "reward"}, {"critic"}, EVEN | CRITIC | {"lambda_": 0.95}),
    "vapo": (
        "vapo_gae", CLIP, TOKENS, {"imitation": "positive"}, {"critic", "parts:success"},
        HIGHER | CRITIC | {"length_alpha": 0.05, "nll_coef": 0.1},
    ),
    "bilevel_ppo": (
        "bilevel_gae", CLIP, TOKENS, WHITE, {"critic"},
        EVEN | CRITIC | {"turn_discount": 0.95, "lambda_": 1.0, "token_lambda": 1.0},
    ),
    "lite_ppo": ("group", CLIP, TOKENS, BATCH, GROUP, EVEN),
    "grpo": ("group", CLIP, ROWS, STD, GROUP, EVEN),
    "dapo": (
        "group", CLIP, TOKENS,
        STD | {"collect": "refill", "rounds": 3, "filters": ("varied",), "reward": ("soft_overlong",)}, GROUP,
        HIGHER | {"overlong_buffer": 16.0, "overlong_coef": 1.0},
    ),
    "pro_rl": (
        "group", CLIP, TOKENS,
        STD | {
            "collect": "refill", "rounds": 3, "filters": ("varied",), "kl": "k3", "finish": ("reset_reference",),
        },
        GROUP | {"reference"},
        {"eps_low": 0.2, "eps_high": 0.4, "kl_coef": 0.01, "reset_every": 100.0, "reset_kl": 1.0},
    ),
    "dr_grpo": ("group", CLIP, WIDTH, CENTRED | {"norm": 64.0}, GROUP, EVEN),
    "gspo": ("group", ("sequence", "ppo"), ROWS, STD, GROUP | {"one_segment"}, {"eps_low": 3e-4, "eps_high": 4e-4}),
    "gspo_token": (
        "group", ("sequence-token", "ppo"), ROWS, STD, GROUP | {"one_segment"}, {"eps_low": 3e-4, "eps_high": 4e-4}
    ),
    "gmpo": ("group", ("geometric", "ppo"), ROWS, STD, GROUP | {"one_segment"}, {"eps_low": 0.4, "eps_high": 0.4}),
    "cispo": ("group", ("token", "cispo"), TOKENS, STD, GROUP, {"eps_low": 1.0, "eps_high": 0.28}),
    "sapo": ("group", ("token", "sapo"), ROWS, STD, GROUP, {"tau_pos": 1.0, "tau_neg": 1.05}),
    "archer": ("group", ("token", "asymmetric"), TOKENS, STD, GROUP, EVEN),
    "gigpo": (
        "gigpo", CLIP, ROWS, {"scale": "none", "episode_statistics": "episode"}, GROUP,
        EVEN | {"step_discount": 0.95, "omega": 1.0},
    ),
    "turn_grpo": (
        "turn_relative", CLIP, TOKENS, {"part": "tool_calls"}, GROUP | {"parts:tool_calls"}, EVEN | {"turn_coef": 1.0}
    ),
    "pass_at_k": ("pass_at_k", CLIP, TOKENS, {"k": 4}, GROUP | {"group>=4"}, EVEN),
    "aspo": (
        "group", CLIP, TOKENS, STD | {"shaping": ("aspo_shaped",)}, GROUP | {"parts:tool_calls", "parts:success"},
        EVEN | {"aspo_delta": -2.0, "aspo_bound": 0.7},
    ),
    "entropy_advantage": (
        "group", CLIP, TOKENS, STD | {"shaping": ("entropy_shaped",)}, GROUP,
        EVEN | {"entropy_alpha": 0.4, "entropy_kappa": 2.0},
    ),
    "clip_cov": (
        "group", CLIP, TOKENS, STD | {"tokens": ("clip_cov",)}, GROUP, EVEN | COV | {"cov_low": 1.0, "cov_high": 5.0}
    ),
    "kl_cov": (
        "group", ("token", "kl-cov"), TOKENS, STD | {"tokens": ("kl_cov",)}, GROUP, COV | {"cov_coef": 1.0}
    ),
    "luffy": (
        "group", ("token", "none"), WIDTH,
        CENTRED | {"norm": 64.0, "collect": "mixed_expert", "experts": 1, "imitation": "luffy"}, GROUP | {"expert"},
        {"luffy_gamma": 0.1},
    ),
    "chord": (
        "own_group", CLIP, TOKENS,
        STD | {"collect": "mixed_expert", "experts": 1, "imitation": "chord", "finish": ("anneal_imitation",)},
        GROUP | {"expert"},
        EVEN | {"mu": 0.9, "mu_peak": 0.9, "mu_valley": 0.05, "mu_warmup": 0.0, "mu_decay": 200.0},
    ),
    "chord_phi": (
        "own_group", CLIP, TOKENS, STD | {"collect": "mixed_expert", "experts": 1, "imitation": "chord-phi"},
        GROUP | {"expert"}, EVEN | {"mu": 0.1},
    ),
    "papo": (
        "group", CLIP, ROWS, STD | {"perception": True}, GROUP,
        EVEN | {"perception_mask": 0.6, "perception_coef": 0.01, "perception_max": 10.0},
    ),
    "starpo_s": (
        "gae", CLIP, TOKENS, WHITE | {"filters": ("uncertain",)}, GROUP | {"critic"},
        HIGHER | CRITIC | {"lambda_": 1.0, "uncertain_fraction": 0.25, "entropy_coef": 0.001},
    ),
    "greso": (
        "group", CLIP, ROWS, STD | {"collect": "skip_settled", "pool": 1024, "oversample": 2}, GROUP,
        EVEN | {"skip_target": 0.25, "skip_step": 0.01, "skip_floor": 0.01},
    ),
}  # fmt: skip
# Loss, pairs, needs and numbers.
WHOLE = "best_against_worst"
COMPARED = {
    "online_dpo": ("dpo", WHOLE, {"pairs", "reference"}, {"beta": 0.1, "label_smoothing": 0.0}),
    "beta_dpo": ("dynamic", WHOLE, {"pairs", "reference"}, {"beta": 0.1, "beta_alpha": 0.6, "kept_pairs": 0.8}),
    "ipo": ("ipo", WHOLE, {"pairs", "reference"}, {"beta": 0.1}),
    "simpo": ("simpo", WHOLE, {"pairs"}, {"beta": 2.0, "gamma": 0.5}),
    "orpo": ("orpo", WHOLE, {"pairs"}, {"odds_coef": 0.1}),
    "cpo": ("cpo", WHOLE, {"pairs"}, {"beta": 0.1, "nll_coef": 1.0}),
    "lcpo": ("lcpo", "shortest_against_longest", {"pairs", "parts:success"}, {}),
    "step_dpo": (
        "dpo", "step_pairs", {"pairs", "reference", "one_segment"}, {"beta": 0.4, "label_smoothing": 0.0}
    ),
    "dmpo": ("dmpo", WHOLE, {"pairs", "reference"}, {"beta": 0.1, "turn_discount": 0.7}),
    "iterative_rpo": ("dpo-nll", WHOLE, {"pairs", "reference"}, {"beta": 0.1, "nll_coef": 1.0}),
    "kto": (
        None, None, {"reference", "one_segment"},
        {"beta": 0.1, "weight_desirable": 1.0, "weight_undesirable": 1.0, "desirable_above": 0.5},
    ),
}  # fmt: skip


def defaults(function):
    return {k: p.default for k, p in inspect.signature(function).parameters.items() if p.default is not p.empty}


def chosen(name):
    """What a preset is composed of, static keywords of its parts too, without what is the plain default."""
    plain = {k: v for k, v in defaults(algorithms.compose).items() if k != "defaults"}
    options = algorithms.PRESETS[name].options
    whole = plain | {k: v for k, v in options.items() if k in plain}
    first = {k: whole.pop(k) for k in ("advantage", "ratio", "clip", "aggregation")}
    listed = lambda x: x if isinstance(x, tuple) else (x,)  # noqa: E731
    parts = [KINDS[k][x] for k in KINDS for x in listed((whole | first)[k]) if x]
    static = {k: v for part in parts for k, v in defaults(part).items() if v is not None}
    required = {k for part in parts for k in inspect.signature(part).parameters}
    static |= {k: v for k, v in options.items() if k in required}
    more = {k: v for k, v in whole.items() if k not in plain or v != plain[k]}
    return first["advantage"], (first["ratio"], first["clip"]), first["aggregation"], more | static


@pytest.mark.parametrize("name", COMPOSED)
def test_a_preset_is_composed_as_its_card_says(name):
    advantage, loss, aggregation, more, needs, numbers = COMPOSED[name]
    algorithm = algorithms.make(name)
    assert algorithms.PRESETS[name].build is algorithms.compose
    assert chosen(name) == (advantage, loss, aggregation, more)
    assert dict(algorithm.hyper) == {"entropy_coef": 0.0} | numbers
    assert algorithm.needs == needs


@pytest.mark.parametrize("name", COMPARED)
def test_a_preset_of_preferences_is_as_its_card_says(name):
    loss, pairs, needs, numbers = COMPARED[name]
    found, algorithm = algorithms.PRESETS[name], algorithms.make(name)
    assert found.build is (algorithms.unpaired if loss is None else algorithms.prefer)
    if loss is not None:
        options = defaults(algorithms.prefer) | found.options
        assert (options["loss"], options["pairs"]) == (loss, pairs)
    assert dict(algorithm.hyper) == numbers
    assert algorithm.needs == needs


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_takes_a_whole_step(name):
    """One program: collect, prepare, update, finish; what comes out is finite, and the policy has moved."""
    algorithm, env = small(name), world(name)
    hyper = make_hyper(algorithm, env, learning_rate=0.1)
    state = make_init(POLICY, CODEC, env, algorithm, CONFIG)(jax.random.key(KEYS.get(name, 3)), hyper, fluent())
    step = jax.jit(make_step(POLICY, CODEC, env, algorithm, CONFIG))
    before, first = jax.tree.map(np.asarray, state.params["policy"]), state
    state, found = step(state)
    assert set(found) >= CORE, set(CORE) - set(found)
    assert set(found) - {"thinking", *dict(env.spec.info)} <= set(train.RESERVED)
    # A state of the same types goes in and out, weak types too: a second step compiles nothing.
    kind = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, getattr(x, "weak_type", None)), tree)  # noqa: E731
    assert kind(first) == kind(state)
    numbers = {k: float(v) for k, v in metrics.finalize(found).items()}
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params)), name
    assert np.isfinite([v for k, v in numbers.items() if not np.isnan(v)]).all() and numbers["skipped_updates"] == 0
    assert jax.tree.structure(state.memory) == jax.tree.structure(algorithm.init(jax.random.key(0), train_shape(env)))
    # The output layer, which no critic reads: its loss alone would move what lies below.
    assert numbers["grad_norm"] > 0 and np.any(before["head"] != np.asarray(state.params["policy"]["head"]))


def train_shape(env):
    from agentrl_jax.algorithm import Shape

    return Shape(CONFIG.episodes, CONFIG.group_size, CONFIG.max_tokens, env.spec.max_turns)
