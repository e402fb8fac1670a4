"""The update: one gradient whatever the split, masked slots never read, clipping and schedules by whole steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batches import batch, masks, trajectory
from tiny import CODEC, POLICY, params

from agentrl_jax import (
    TransformerConfig,
    algorithms,
    envs,
    losses,
    objectives,
    scoring,
    train,
    transformer_policy,
    update,
)
from agentrl_jax import metrics as metrics_lib
from agentrl_jax.masked import MODES
from agentrl_jax.surrogates import surrogate
from agentrl_jax.types import Score
from agentrl_jax.update import UpdateConfig

U, T = 8, 16
LENGTHS = (16, 4, 9, 2, 16, 7, 12, 5)
ALLOWED = np.asarray(CODEC.sampleable)
ENV = envs.make("probe_one_action")
HYPER = {k: jnp.float32(v) for k, v in algorithms.make("ppo", kl_coef=0.3, entropy_coef=0.1).hyper.items()}


def score(p, name, b, policy=POLICY):
    return scoring.score(policy, p["policy"], scoring.View(), b, allowed=ALLOWED)


def everything():
    """Surrogate, clip, KL, entropy and value loss at once."""
    return algorithms.make("ppo", kl_coef=0.3, entropy_coef=0.1)._replace(
        loss=objectives.token_objective(surrogate("token", "ppo").surrogate, kl="k3", critic=True)
    )


def model():
    return {"policy": params() | {"value": jax.random.normal(jax.random.key(1), (16,))}}


def rows(seed=0):
    b = batch(trajectory(masks(LENGTHS, T, seed)), seed)
    # Some tokens are dropped from the loss on top of the written ones.
    return b._replace(mask=b.mask & (jax.random.uniform(jax.random.key(seed), b.mask.shape) < 0.9))


def weighed(b, mode, norm=20.0):
    return objectives.weigh_tokens(mode, norm=norm if mode.endswith("norm") else None)(b, HYPER, 1)


@functools.cache
def gradient(microbatches=1, widths=(), single=False):
    return jax.jit(
        lambda p, b, h: update.gradient(
            everything(), score, p, b, h, microbatches=microbatches, widths=widths, single=single
        )
    )


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pieces, widths", [(2, ()), (4, (4, 8)), (8, ()), (1, (4, 8))])
def test_splits_and_widths_and_order_give_one_gradient(mode, pieces, widths):
    b = weighed(rows(), mode)
    grads, loss, metrics = gradient()(model(), b, HYPER)
    order = np.random.default_rng(pieces).permutation(U)
    *other, parts = gradient(pieces, widths)(model(), update.take(b, order), HYPER)
    assert_close([grads, loss], other)
    assert_close(metrics_lib.finalize(metrics), metrics_lib.finalize(parts))
    assert all(np.any(g) for name, g in grads["policy"].items())


def test_a_narrow_batch_is_computed_narrow_and_equal():
    """All rows fit into 8 of 16 tokens."""
    b = weighed(batch(trajectory(masks((8, 4, 5, 2, 8, 7, 3, 5), T))), "token-mean")
    assert_close(gradient()(model(), b, HYPER), gradient(1, (4, 8))(model(), b, HYPER))


def test_trimming_leaves_turns_alone():
    traj = trajectory(masks(LENGTHS, T), turns=T)
    b = batch(traj._replace(record=jnp.zeros((U, T))))
    short = update.trim(b, 5)
    assert short.mask.shape == short.traj.tokens.shape == short.extra["logp_ref"].shape == (U, 5)
    assert short.traj.steps["played"].shape == short.traj.record.shape == (U, T) and short.bootstrap.shape == (U,)


def test_the_width_is_chosen_by_a_branch_also_under_vmap():
    b = weighed(rows(), "token-mean")
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), (model(), b))
    f = lambda p, b: update.gradient(everything(), score, p, b, HYPER, microbatches=2, widths=(4, 8))[0]  # noqa: E731
    text = str(jax.make_jaxpr(jax.vmap(f))(*stacked))
    assert text.count("branches=") == str(jax.make_jaxpr(f)(model(), b)).count("branches=") == 1


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -1e30])
def test_masked_slots_may_hold_anything(garbage):
    b = weighed(rows(), "seq-mean-token-mean")
    dirty = lambda x: jnp.where(b.mask, x, garbage)  # noqa: E731
    bad = b._replace(
        adv=dirty(b.adv), target=dirty(b.target), logp_old=dirty(b.logp_old), value=dirty(b.value),
        extra={"logp_ref": dirty(b.extra["logp_ref"])}, traj=b.traj._replace(logp=dirty(b.traj.logp)),
    )  # fmt: skip
    assert_close(gradient()(model(), b, HYPER), gradient()(model(), bad, HYPER), 0, 0)


def test_nothing_to_learn_from_is_nothing_learned_and_is_visible():
    b = rows()._replace(mask=jnp.zeros((U, T), bool))
    algorithm = everything()._replace(weigh=objectives.weigh_tokens("seq-mean-token-mean"))
    state = start(algorithm, UpdateConfig())
    after, metrics = jax.jit(lambda s, b: update.update(algorithm, UpdateConfig(), score, s, b, jax.random.key(0)))(
        state, b
    )
    jax.tree.map(np.testing.assert_array_equal, state.params, after.params)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(metrics))
    assert metrics["loss"][0] == 0 and metrics["loss_tokens"][0] == 0 and metrics["grad_norm"][0] == 0


def start(algorithm, config, p=None, **numbers):
    init = train.make_init(POLICY, CODEC, ENV, algorithm, train.TrainConfig(4, 2, max_tokens=8, update=config))
    numbers = {"max_grad_norm": 1e9} | numbers
    hyper = train.make_hyper(algorithm, ENV, **numbers)
    state = init(jax.random.key(0), hyper, None if p is None else p)
    return state if p is not None else state._replace(params=model())


# The first on-policy step (P16)


def test_the_policy_gradient_of_two_tokens():
    """Worked numbers of the first step: value 0, gradient that of ``-mean(A log p)``."""
    logits, actions, adv = (
        jnp.asarray([[0.2, -0.1, 0.4], [0, 0.5, -0.5]]),
        jnp.asarray([2, 0]),
        jnp.asarray([1.0, -1.0]),
    )
    b = batch(trajectory(np.ones((2, 1))))._replace(adv=adv[:, None])
    b = objectives.weigh_tokens("token-mean")(b, HYPER, 1)

    def chosen(p, name, b):
        logp = jax.nn.log_softmax(p["policy"])[jnp.arange(2), actions][:, None]
        return Score(logp, jnp.zeros((2, 1)), jnp.zeros((2, 1)), jnp.zeros(2))

    hyper = {k: jnp.float32(v) for k, v in algorithms.make("grpo").hyper.items()}
    grads, loss, metrics = update.gradient(algorithms.make("grpo"), chosen, {"policy": logits}, b, hyper, single=True)
    expected = [[0.168792, 0.125044, -0.293837], [0.346402, -0.253240, -0.093162]]
    np.testing.assert_allclose(grads["policy"], expected, atol=1e-6)
    np.testing.assert_allclose(loss, 0.0, atol=1e-7)
    done = metrics_lib.finalize(metrics)
    assert done["clip_high"] == done["clip_low"] == done["kl_old"] == 0


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_first_step_is_the_policy_gradient_of_the_real_model(name):
    policy = transformer_policy(TransformerConfig(CODEC.vocab_size, layers=1, width=32, heads=2, value_head=True))
    p = {"policy": policy.init(jax.random.key(0))}
    algorithm = algorithms.make(name)
    hyper = {k: jnp.float32(v) for k, v in algorithm.hyper.items()} | {"value_coef": jnp.float32(0)}
    scores = functools.partial(score, policy=policy)
    b = algorithm.weigh(rows(), hyper, 1)

    def plain(p, b):
        logp = scores(p, "policy", b).logp
        return jnp.sum(b.weight * losses.policy_gradient(logp, b.adv, mask=b.mask)), logp

    def both(p, b):
        (_, logp), expected = jax.value_and_grad(plain, has_aux=True)(p, b)
        first = update.gradient(algorithm, scores, p, b, hyper, single=True)
        later = update.gradient(algorithm, scores, p, b._replace(logp_old=logp), hyper)
        return expected, first, later

    expected, *ways = jax.jit(both)(p, b)
    for grads, _, metrics in ways:
        assert_close(grads, expected)
        done = metrics_lib.finalize(metrics)
        assert done["clip_high"] == done["clip_low"] == 0 and abs(done["kl_old"]) < 1e-6


# The optimiser's step


def linear(p, name, b):
    """A "log-probability" that is linear in two numbers: row ``u`` has the gradient ``adv[u, :2]``."""
    x = jnp.sum(b.adv[:, :2] * p["policy"]["w"], axis=1, keepdims=True)
    return Score(x, x, x, x[:, 0])


def summed(scores, b, hyper):
    return jnp.sum(b.weight[:, :1] * scores["policy"].logp), {}


def line(gradients, **config):
    """State, batch and step of a linear loss: the mean over rows of ``gradients [U, 2]``."""
    gradients = np.asarray(gradients, np.float32)
    count = len(gradients)
    algorithm = algorithms.make("reinforce")._replace(
        needs=frozenset(),
        loss=summed,
        weigh=lambda b, h, s: b._replace(weight=jnp.full_like(b.weight, 1 / b.mask.shape[0])),
    )
    config = UpdateConfig(optimizer="sgd", **config)
    b = batch(trajectory(np.ones((count, 2))))._replace(adv=jnp.asarray(gradients))
    step = lambda s, b, k=0: update.update(algorithm, config, linear, s, b, jax.random.key(k))  # noqa: E731

    def begin(**numbers):
        return start(algorithm, config, {"w": jnp.zeros(2)}, **({"learning_rate": 1.0} | numbers))

    return begin, b, step


def test_clipping_sees_the_whole_minibatch():
    begin, b, step = line([[3, 4], [-3, 4]], microbatches=2)
    state, metrics = step(begin(max_grad_norm=1.0), b)
    np.testing.assert_allclose(state.params["policy"]["w"], [0, -1], atol=1e-6)
    assert metrics["grad_norm"][0] == 4 and metrics["clipped_updates"][0] == 1
    state, metrics = step(begin(max_grad_norm=5.0), b)
    np.testing.assert_allclose(state.params["policy"]["w"], [0, -4], atol=1e-6)
    assert metrics["clipped_updates"][0] == 0


def test_the_schedule_counts_updates_not_micro_batches():
    begin, b, step = line(np.ones((4, 2)), microbatches=4, schedule="linear")
    state, step, rates = begin(decay=10.0), jax.jit(step), []
    for _ in range(10):
        state, metrics = step(state, b)
        rates.append(float(metrics["learning_rate"][0]))
    np.testing.assert_allclose(state.params["policy"]["w"], -5.5, rtol=1e-5)
    assert int(state.updates) == 10
    np.testing.assert_allclose(rates, 1 - np.arange(10) / 10, rtol=1e-5)


def test_schedules():
    hyper = train.make_hyper(algorithms.make("grpo"), ENV, learning_rate=2.0, warmup=4, decay=12)
    rate = lambda name, at: float(update.learning_rate(UpdateConfig(schedule=name), hyper, jnp.int32(at)))  # noqa: E731
    assert [rate(n, 0) for n in ("constant", "linear", "cosine")] == [0.5] * 3
    assert [rate("constant", at) for at in (1, 3, 4, 99)] == [1.0, 2.0, 2.0, 2.0]
    assert [rate("linear", at) for at in (4, 8, 12, 99)] == pytest.approx([2.0, 1.0, 0.0, 0.0])
    assert [rate("cosine", at) for at in (4, 6, 8, 12)] == pytest.approx([2.0, 1 + 2**-0.5, 1.0, 0.0], abs=1e-6)
    assert np.isfinite(rate("linear", 0)) and float(hyper.decay) == 12
    hyper = train.make_hyper(algorithms.make("grpo"), ENV)
    assert np.isnan(rate("cosine", 0)) and rate("constant", 99) == pytest.approx(1e-3)  # No end, no shape.


def test_weight_decay_is_decoupled_and_on_matrices_alone():
    algorithm, config = algorithms.make("reinforce"), UpdateConfig()
    p = {"matrix": jnp.full((2, 2), 3.0), "vector": jnp.full(2, 3.0), "scalar": jnp.float32(3.0)}
    state = start(algorithm, config, p, learning_rate=0.1, weight_decay=0.5)
    after, _ = update.apply(config, state, {"policy": jax.tree.map(jnp.zeros_like, p)})
    np.testing.assert_allclose(after.params["policy"]["matrix"], 3 - 0.1 * 0.5 * 3, rtol=1e-6)
    assert np.all(after.params["policy"]["vector"] == 3) and after.params["policy"]["scalar"] == 3


def test_adam_is_optax():
    config = UpdateConfig(b1=0.8, b2=0.9, eps=1e-6)
    p = {"w": jnp.asarray([1.0, -2.0])}
    state = start(algorithms.make("reinforce"), config, p, learning_rate=0.1)
    reference = optax.adam(0.1, b1=0.8, b2=0.9, eps=1e-6)
    expected, memory = p, reference.init(p)
    for i in range(4):
        g = {"w": jnp.asarray([0.3 * i, -1.0])}
        state, _ = update.apply(config, state, {"policy": g})
        delta, memory = reference.update(g, memory)
        expected = optax.apply_updates(expected, delta)
    np.testing.assert_allclose(state.params["policy"]["w"], expected["w"], rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_refused_and_counted(bad):
    config = UpdateConfig()
    state = start(algorithms.make("reinforce"), config, {"w": jnp.ones(2), "v": jnp.ones((2, 2))}, weight_decay=0.1)
    fine = {"policy": {"w": jnp.ones(2), "v": jnp.ones((2, 2))}}
    state, _ = update.apply(config, state, fine)
    after, metrics = update.apply(config, state, {"policy": fine["policy"] | {"w": jnp.asarray([1.0, bad])}})
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (after.params, after.opt_state))
    assert (int(after.updates), int(after.skipped)) == (1, 1)
    assert metrics["skipped_updates"] == (1, 1) and metrics["grad_norm"] == (0, 0)
    again, _ = update.apply(config, after, fine)
    assert int(again.updates) == 2 and np.all(np.isfinite(again.params["policy"]["w"]))


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "max_grad_norm"])
def test_a_number_that_is_not_finite_reaches_no_parameter(name):
    p = {"w": jnp.ones(2), "v": jnp.ones((2, 2))}
    state = start(algorithms.make("reinforce"), UpdateConfig(), p)
    state = state._replace(hyper=state.hyper._replace(**{name: jnp.float32(jnp.nan)}))
    after, metrics = update.apply(UpdateConfig(), state, {"policy": p})
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (after.params, after.opt_state))
    assert int(after.skipped) == 1 and metrics["skipped_updates"] == (1, 1)


def test_without_a_view_called_policy_the_old_log_probabilities_stay():
    views = {"own": scoring.View()}
    algorithm = algorithms.make("grpo")._replace(
        views=views,
        loss=lambda scores, b, h: (jnp.sum(scores["own"].logp), {"old": metrics_lib.scalar(b.logp_old[0, 0])}),
    )
    b = batch(trajectory(np.ones((2, 2))))._replace(adv=jnp.ones((2, 2)))
    _, _, metrics = update.gradient(algorithm, linear, {"policy": {"w": jnp.ones(2)}}, b, {}, single=True)
    assert metrics["old"][0] == b.logp_old[0, 0]


# Minibatches


def test_every_row_is_used_once_a_pass_and_in_another_order():
    """Row ``u`` moves the first number by ``2 ** u``: a sum of all of them means each was used once."""
    begin, b, step = line([[2.0**u, 0] for u in range(8)], epochs=3, minibatches=4)
    state, metrics = step(begin(), b)
    assert float(state.params["policy"]["w"][0]) == -3 * 255 / 2  # a minibatch is a mean of two rows
    assert int(state.updates) == 12 and metrics["learning_rate"][1] == 12
    losses_seen = [float(step(begin(), b, k)[1]["loss"][0]) for k in range(4)]
    assert len(set(losses_seen)) > 1  # the order is in the key
    assert losses_seen[0] == float(step(begin(), b, 0)[1]["loss"][0])


def test_rows_of_an_episode_stay_together():
    traj = trajectory(np.ones((12, 2)), segments=3)
    b = batch(traj)

    def weigh(b, hyper, segments):
        assert segments == 3
        together = b.traj.episode.reshape(-1, 3)
        apart = jnp.sum(together != together[:, :1]) + jnp.sum(b.traj.segment.reshape(-1, 3) != jnp.arange(3))
        return b._replace(weight=jnp.full_like(b.weight, apart.astype(jnp.float32)))

    algorithm = algorithms.make("reinforce")._replace(
        needs=frozenset(), weigh=weigh, loss=lambda s, b, h: (jnp.sum(b.weight) + 0 * jnp.sum(s["policy"].logp), {})
    )
    config = UpdateConfig(epochs=2, minibatches=2, optimizer="sgd")
    state = start(algorithm, config, {"w": jnp.zeros(2)})
    _, metrics = update.update(algorithm, config, linear, state, b, jax.random.key(3), segments=3)
    assert metrics["loss"] == (0, 4)


def test_a_restarting_episode_is_one_sequence():
    mask = np.asarray([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]], bool)
    b = objectives.weigh_tokens("seq-mean-token-mean")(batch(trajectory(mask, segments=2)), {}, 2)
    np.testing.assert_allclose(b.weight, np.where(mask, 1 / 6, 0), rtol=1e-6)


@pytest.mark.parametrize("config", [UpdateConfig(minibatches=3), UpdateConfig(minibatches=2, microbatches=3)])
def test_what_does_not_divide_is_refused(config):
    begin, b, _ = line(np.ones((8, 2)))
    with pytest.raises(ValueError, match="8 units in blocks of 1 do not split into"):
        update.update(algorithms.make("reinforce"), config, linear, begin(), b, jax.random.key(0))
