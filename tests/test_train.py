"""Training as one program: a scan equals its steps, numbers never recompile, nothing leaves the device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import trajectory
from jax.experimental.key_reuse import _core as key_reuse
from test_rollout import equations
from tiny import CODEC, POLICY

from agentrl_jax import (
    TrainConfig,
    TransformerConfig,
    UpdateConfig,
    algorithms,
    envs,
    scoring,
    stages,
    transformer_policy,
)
from agentrl_jax.metrics import finalize, masked, merge, reduce, scalar
from agentrl_jax.train import make_hyper, make_init, make_step, make_train, rollout_metrics
from agentrl_jax.types import Start

ENV = envs.make("probe_observation")
STEPS = 3
CONFIG = TrainConfig(
    16, 4, slots=6, max_tokens=10, update=UpdateConfig(epochs=2, minibatches=2, microbatches=2, widths=(8,))
)


def algorithm():
    """Several updates, a penalty against a reference, an entropy bonus: all of the machinery at once."""
    return algorithms.make("grpo", kl_coef=0.02, entropy_coef=0.01, aggregation="token-mean")


def hyper(**numbers):
    return make_hyper(algorithm(), ENV, **({"learning_rate": 0.01, "warmup": 2} | numbers))


@functools.cache
def init():
    return jax.jit(make_init(POLICY, CODEC, ENV, algorithm(), CONFIG))


@functools.cache
def step():
    return jax.jit(make_step(POLICY, CODEC, ENV, algorithm(), CONFIG), donate_argnums=0)


@functools.cache
def train():
    return jax.jit(make_train(POLICY, CODEC, ENV, algorithm(), CONFIG, steps=STEPS))


def by_steps(key, numbers):
    state, history = init()(key, numbers), []
    for _ in range(STEPS):
        state, metrics = step()(state)
        history.append(jax.tree.map(np.asarray, finalize(metrics)))
    return state, {k: np.stack([h[k] for h in history]) for k in history[0]}


def assert_equal(a, b):
    raw = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(raw(x), raw(y)), a, b)


def assert_close(a, b, tolerance=1e-5):
    raw = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    jax.tree.map(lambda x, y: np.testing.assert_allclose(raw(x), raw(y), rtol=tolerance, atol=tolerance), a, b)


def test_a_scan_of_steps_equals_the_steps():
    key = jax.random.key(1)
    state, history = by_steps(key, hyper())
    whole, scanned = train()(key, hyper())
    # Two programs: XLA may round them differently, which is a thousandth of one of Adam's steps.
    assert_close(state, whole, 1e-5)
    assert history.keys() == scanned.keys()
    for name in history:
        np.testing.assert_allclose(history[name], scanned[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert int(whole.step) == STEPS and int(whole.updates) == 4 * STEPS and int(whole.skipped) == 0
    assert not np.array_equal(whole.params["policy"]["head"], whole.params["reference"]["head"])


def test_sampling_and_scoring_agree_at_every_update():
    history = by_steps(jax.random.key(2), hyper(learning_rate=0.05, temperature=0.7))[1]
    assert np.all(history["max_logp_gap"] > 0) and np.all(history["max_logp_gap"] <= 1e-4)
    assert np.all(history["loss_tokens"] * 2 > 16) and np.all(np.isfinite(history["grad_norm"]))
    np.testing.assert_allclose(history["learning_rate"], [0.05 * 7 / 8, 0.05, 0.05], rtol=1e-6)
    assert history["kl"][-1] > 0 and np.all(history["kl_old"] > 0)


def test_numbers_of_every_kind_compile_nothing():
    base = {
        "learning_rate": 0.02, "weight_decay": 0.1, "max_grad_norm": 0.5, "warmup": 3, "decay": 50, "temperature": 0.9,
        "eps_low": 0.1, "eps_high": 0.3, "kl_coef": 0.0, "entropy_coef": 0.0,
        "env_params": ENV.params._replace(reward=2),
    }  # fmt: skip
    assert set(base) == set(hyper()._fields) - {"algorithm"} | set(algorithm().hyper)
    by_steps(jax.random.key(3), hyper())
    compiled = step()._cache_size()
    for name, value in base.items():
        step()(init()(jax.random.key(4), hyper(**{name: value})))
    assert step()._cache_size() == compiled == 1


def test_a_whole_number_for_a_fraction_is_a_fraction_and_the_reverse_is_refused():
    assert hyper(env_params=ENV.params._replace(reward=2)).env_params.reward.dtype == jnp.float32
    guess = envs.make("guess")
    with pytest.raises(
        ValueError, match=r"an environment parameter must be int32, as its default 100, got float32: 50.5"
    ):
        make_hyper(algorithm(), guess, env_params=guess.params._replace(high=50.5))


def test_numbers_have_their_effect():
    key = jax.random.key(5)
    after = lambda **numbers: step()(init()(key, hyper(**numbers)))  # noqa: E731
    _, one = after()
    _, two = after(env_params=ENV.params._replace(reward=2))
    np.testing.assert_allclose(two["reward"][0], 2 * one["reward"][0], rtol=1e-6)
    still, _ = after(learning_rate=0.0)
    assert_equal(still.params["policy"], init()(key, hyper()).params["policy"])
    assert float(after(max_grad_norm=1e-3)[1]["clipped_updates"][0]) == 4


def test_the_step_moves_nothing_between_host_and_device():
    state, _ = step()(init()(jax.random.key(6), hyper()))
    with jax.transfer_guard("disallow"):
        state, metrics = step()(state)
    jaxpr = jax.make_jaxpr(make_step(POLICY, CODEC, ENV, algorithm(), CONFIG))(state).jaxpr
    assert not [e.primitive.name for e in equations(jaxpr) if "callback" in e.primitive.name]
    assert np.isfinite(float(metrics["loss"][0]))


def test_no_key_of_a_step_is_used_twice():
    state = init()(jax.random.key(0), hyper())
    key_reuse.check_key_reuse(make_step(POLICY, CODEC, ENV, algorithm(), CONFIG), state)


def test_a_donated_state_is_gone_and_the_callers_numbers_are_not():
    numbers = hyper()
    state = init()(jax.random.key(7), numbers)
    after, _ = step()(state)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    assert not any(x.is_deleted() for x in jax.tree.leaves((numbers, after)))
    step()(after)


def test_vmap_over_seeds_and_learning_rates_equals_separate_runs():
    keys, rates = jax.random.split(jax.random.key(8), 2), jnp.asarray([0.003, 0.02])
    many = jax.vmap(lambda r: hyper()._replace(learning_rate=r))(rates)
    state, history = jax.jit(jax.vmap(make_train(POLICY, CODEC, ENV, algorithm(), CONFIG, steps=STEPS)))(keys, many)
    for i in range(2):
        alone, one = train()(keys[i], jax.tree.map(lambda x, i=i: x[i], many))
        assert_close(jax.tree.map(lambda x, i=i: x[i], state.params), alone.params, 2e-4)
        assert_close(history["reward"][i], one["reward"])
        assert_close(history["loss"][i], one["loss"])
        assert_close(history["length"][i], one["length"])


def with_stage(stage):
    return algorithm()._replace(prepare=stages.chain(stages.score_reference(), stage))


def abstract(algorithm):
    """What a step would give, or why it cannot be made."""
    state = jax.eval_shape(make_init(POLICY, CODEC, ENV, algorithm, CONFIG), jax.random.key(0))
    return jax.eval_shape(make_step(POLICY, CODEC, ENV, algorithm, CONFIG), state)


def test_a_metric_with_two_sources_is_refused():
    twice = with_stage(lambda memory, b, tools, hyper, key: (memory, b, {"length": scalar(1.0), "own": scalar(2.0)}))
    with pytest.raises(ValueError, match=r"the metrics \['length'\] have two sources in one step"):
        abstract(twice)


def test_scoring_by_an_unknown_model_names_those_there_are():
    asks = with_stage(lambda memory, b, tools, hyper, key: (memory, tools.score(scoring.View("critic"), b), {}))
    with pytest.raises(ValueError, match=r"Tools\.score asks for the model 'critic'; there is: policy, reference"):
        abstract(asks)


def test_pairs_of_more_groups_than_equal_ones_are_refused():
    group = np.arange(16) // 2
    preset = algorithms.make("online_dpo")._replace(
        collect=lambda memory, tools, hyper, key: (memory, tools.roll(key, start=Start(group=group)))
    )
    config = CONFIG._replace(update=UpdateConfig())
    with pytest.raises(ValueError, match=r"start.group must be in \[0, 4\), got 4"):
        jax.eval_shape(
            make_step(POLICY, CODEC, ENV, preset, config),
            jax.eval_shape(make_init(POLICY, CODEC, ENV, preset, config), jax.random.key(0)),
        )


def test_what_a_refused_step_would_have_remembered_is_forgotten():
    counting = algorithms.make("reinforce")._replace(
        init=lambda key, shape: (jnp.zeros(()), key),
        prepare=lambda memory, traj, *_: ((memory[0] + 1, memory[1]), scoring.as_batch(traj), {}),
    )
    config = TrainConfig(2, 1, max_tokens=6)
    good = make_init(POLICY, CODEC, ENV, counting, config)(jax.random.key(0))
    run = jax.jit(make_step(POLICY, CODEC, ENV, counting, config))
    after, _ = run(good)
    assert after.memory[0] == 1 and int(after.updates) == 1
    after, _ = run(good._replace(hyper=good.hyper._replace(learning_rate=jnp.float32(jnp.nan))))
    assert after.memory[0] == 0 and int(after.updates) == 0 and int(after.skipped) == 1 and int(after.step) == 1


def test_a_cut_action_that_is_not_played_is_an_action():
    traj = trajectory(np.ones((2, 2)))
    steps = {"played": jnp.asarray([[True, False]] * 2), "cut": jnp.asarray([[False, True], [False, False]])}
    assert rollout_metrics(traj._replace(steps=traj.steps | steps))["cut_actions"] == (1, 3)


def test_a_schedule_ends_with_the_run_or_must_be_told_when():
    preset, config = algorithms.make("grpo"), TrainConfig(4, 2, max_tokens=6, update=UpdateConfig(2, schedule="linear"))
    begin, numbers = make_init(POLICY, CODEC, ENV, preset, config), make_hyper(preset, ENV)
    with pytest.raises(ValueError, match="the linear schedule needs decay"):
        begin(jax.random.key(0), numbers)
    assert begin(jax.random.key(0), numbers._replace(decay=8.0)).hyper.decay == 8
    _, history = jax.jit(make_train(POLICY, CODEC, ENV, preset, config, steps=2))(jax.random.key(0), numbers)
    np.testing.assert_allclose(history["learning_rate"], [1e-3 * 0.875, 1e-3 * 0.375], rtol=1e-5)


def test_supervision_uses_the_experts_words_and_no_model_to_sample():
    policy = transformer_policy(TransformerConfig(CODEC.vocab_size, layers=1, width=32, heads=2))
    preset, config = (
        algorithms.make("behavior_cloning"),
        TrainConfig(16, 1, max_tokens=10, update=UpdateConfig(b2=0.95)),
    )
    run = jax.jit(make_train(policy, CODEC, ENV, preset, config, steps=40))
    state, history = run(jax.random.key(0), make_hyper(preset, ENV, learning_rate=0.02))
    assert np.all(history["success"] == 1) and np.all(history["loss_tokens"] == 32)
    assert history["loss"][0] > 5 and history["loss"][-1] < 0.2
    assert np.isnan(history["logp"]).all()  # nothing was sampled
    assert int(state.updates) == 40


# Metrics


def test_metrics_are_sums_and_counts():
    x, mask = jnp.asarray([1.0, np.nan, 3.0]), jnp.asarray([True, False, True])
    assert masked(x, mask) == (4, 2) and scalar(5) == (5, 1)
    a, b = {"m": (4.0, 2.0), "max_x": (1.0, 1.0)}, {"m": (2.0, 1.0), "max_x": (7.0, 1.0), "own": (1.0, 0.0)}
    both = merge(a, b)
    assert both["m"] == (6, 3) and both["max_x"][0] == 7 and both["own"] == (1, 0)
    done = finalize(both)
    assert done["m"] == 2 and done["max_x"] == 7 and np.isnan(done["own"])
    stacked = jax.tree.map(lambda *v: jnp.asarray(v), a, {k: b[k] for k in a})
    assert {k: float(v) for k, v in finalize(reduce(stacked)).items()} == {"m": 2.0, "max_x": 7.0}
