"""Presets by name: each resolves, says what it is, takes one whole step, and refuses what it cannot do."""

import functools
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from quiz import ENV, fluent
from tiny import CODEC, POLICY

from agentrl_jax import TrainConfig, UpdateConfig, algorithms, envs, make_hyper, make_init, make_step, metrics, train

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


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_takes_a_whole_step(name):
    """One program: collect, prepare, update, finish; what comes out is finite, and the policy has moved."""
    algorithm, env = small(name), world(name)
    hyper = make_hyper(algorithm, env, learning_rate=0.1)
    state = make_init(POLICY, CODEC, env, algorithm, CONFIG)(jax.random.key(3), hyper, fluent())
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
    moved = any(
        np.any(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state.params["policy"]), strict=True)
    )
    assert moved == (numbers["grad_norm"] > 0)


def train_shape(env):
    from agentrl_jax.algorithm import Shape

    return Shape(CONFIG.episodes, CONFIG.group_size, CONFIG.max_tokens, env.spec.max_turns)
