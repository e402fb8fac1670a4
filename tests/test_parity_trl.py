"""The same losses and gradients as TRL's trainers, where they are installed: ``pip install -e '.[test,parity]'``.

TRL's own code computes its numbers (``trl_trainers``). Where it and this package differ on purpose, the name of the
test says so, and the test holds the exact relation. Run with TRL 1.16.0, PyTorch 2.14.1 on a CPU, transformers 5.24.0,
accelerate 1.15.0 and JAX 0.10.2.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import tools as tools_of
from batches import trajectory

from agentrl_jax import groups, imitation, importance, losses, preference, scoring, selection, stages, statistics
from agentrl_jax.algorithms import compose, prefer, unpaired
from agentrl_jax.entropy import entropy, full_kl, top_entropy_mask
from agentrl_jax.masked import aggregate, masked_sum
from agentrl_jax.types import Score

for name in ("torch", "trl"):
    pytest.importorskip(name, reason="the parity extra is not installed")
import trl_trainers as peer  # noqa: E402

# TRL announces what it will rename; that is not ours to answer.
pytestmark = pytest.mark.filterwarnings("ignore:::(trl|torch|transformers|accelerate)")

B, T, PAIRS, VOCAB = 8, 12, 4, 7
LENGTHS = np.asarray([12, 9, 3, 7, 1, 10, 5, 8])


def sample(seed=0, *, tools=True, lengths=LENGTHS):
    """Ragged rows, with observations between the agent's words; ratios on both sides of every clip."""
    rng = np.random.default_rng(seed)
    completion = np.arange(T) < lengths[:, None]
    written = rng.random((B, T)) < 0.7
    written[:, 0] = True
    mask = completion & written if tools else completion
    normal = lambda scale: rng.normal(0.0, scale, (B, T)).astype(np.float32)  # noqa: E731
    logp = -np.abs(normal(1.5)) - 0.05
    old = logp + normal(0.3)
    adv = rng.normal(size=B).astype(np.float32)
    adv[:2] = 1.0, -1.0
    return peer.Rows(logp, old, logp + normal(0.4), old + normal(0.2), np.abs(normal(1.0)), adv, completion, mask)


def agree(found, theirs):
    """Value and gradients, entry by entry."""
    value, grads = found
    np.testing.assert_allclose(value, theirs.loss, rtol=1e-5, atol=1e-5)
    for mine, other in zip(grads, theirs.grads, strict=True):
        assert np.any(other)
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def differentiate(loss, *at):
    return jax.value_and_grad(loss, argnums=tuple(range(len(at))))(*map(jnp.asarray, at))


def batch_of(rows):
    """The rows as an algorithm is given them, without weights."""
    batch = scoring.as_batch(trajectory(rows.mask))
    adv = jnp.broadcast_to(rows.adv[:, None], rows.mask.shape)
    return batch._replace(adv=adv, logp_old=jnp.asarray(rows.old), extra={"logp_ref": jnp.asarray(rows.ref)})


def objective(algorithm, batch, **numbers):
    """The loss of an algorithm as a function of log-probabilities and entropies, and its metrics."""
    hyper = {k: jnp.float32(v) for k, v in {**algorithm.hyper, **numbers}.items()}
    batch = algorithm.weigh(batch, hyper, 1)

    def loss(logp, spread):
        return algorithm.loss({"policy": Score(logp, spread, jnp.zeros_like(logp), batch.bootstrap)}, batch, hyper)

    return loss


def token_loss(rows, *, gate=None, **keywords):
    """``compose``'s loss of the rows and its gradients by log-probabilities and entropies; ``gate`` are weights on the
    policy's part, as a stage leaves them."""
    batch = batch_of(rows)
    if gate is not None:
        batch = batch._replace(extra=batch.extra | {"importance": gate})
    loss = objective(compose(**keywords), batch)
    return differentiate(lambda logp, spread: loss(logp, spread)[0], rows.logp, rows.entropy)


def same_policy_loss(found, theirs):
    """The policy's part: entropies have no gradient."""
    assert not np.any(found[1][1]) and not np.any(theirs.grads[1])
    agree((found[0], found[1][:1]), theirs._replace(grads=theirs.grads[:1]))


# Policy losses: GRPO and its kin

SEQUENCES: dict[str, Any] = {"aggregation": "seq-mean-token-mean"}
GSPO = {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1}
WIDTHS = {"eps_low": 0.05, "eps_high": 0.1}

POLICY = {
    "grpo": ({}, SEQUENCES),
    "bnpo": ({"loss_type": "bnpo"}, {}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"eps_high": 0.28}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregation": "seq-mean-token-sum-norm", "norm": 16}),
    "sums of tokens": ({"loss_type": "luspo"}, {"aggregation": "seq-mean-token-sum"}),
    "gspo": (GSPO, {"ratio": "sequence"} | SEQUENCES | WIDTHS),
    # The advantage is one number a sequence: GSPO-token is GSPO.
    "gspo of tokens": (GSPO, {"ratio": "sequence-token"} | SEQUENCES | WIDTHS),
    "gspo over tokens": (GSPO | {"loss_type": "dapo"}, {"ratio": "sequence"} | WIDTHS),
    "two-sided": ({"delta": 1.5}, {"clip": "two-sided", "ratio_max": 1.5} | SEQUENCES),
    # Below 1 + eps_high it bounds positive advantages too.
    "two-sided, narrow": ({"delta": 1.1}, {"clip": "two-sided", "ratio_max": 1.1} | SEQUENCES),
    # Above it the dual clip with the same number is the same loss.
    "two-sided, by the dual clip": ({"delta": 1.5}, {"clip": "dual", "dual_clip": 1.5} | SEQUENCES),
    # TRL's cap is absolute, here it is 1 + eps_high.
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, {"clip": "cispo", "eps_high": 0.2}),
    "sapo": ({"loss_type": "sapo"}, {"clip": "sapo"} | SEQUENCES),
    "sapo, other temperatures": (
        {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0},
        {"clip": "sapo", "tau_pos": 0.7, "tau_neg": 2.0} | SEQUENCES,
    ),
    "gmpo": (
        {"path": peer.GMPO, "epsilon_low": 0.3, "epsilon_high": 0.4},
        {"ratio": "geometric", "eps_low": 0.3, "eps_high": 0.4} | SEQUENCES,
    ),
}  # fmt: skip


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("name", POLICY)
def test_policy_losses_with_and_without_k3(name, beta):
    settings, keywords = POLICY[name]
    rows = sample()
    found = token_loss(rows, kl="k3", kl_coef=beta, **keywords)
    same_policy_loss(found, peer.token_loss(rows, beta=beta, **settings))


@pytest.mark.parametrize("widths", [(0.2, 0.2), (0.6, 0.8)])
def test_rloo_is_clipped_products_of_ratios(widths):
    """RLOO has no tool mask: every token of a completion counts."""
    rows = sample(5, tools=False)
    ratio = np.exp(np.where(rows.mask, rows.logp - rows.old, 0.0).sum(1))
    low, high = (ratio < 1 - widths[0]) & (rows.adv < 0), (ratio > 1 + widths[1]) & (rows.adv > 0)
    assert low.any() and high.any() and not (low | high).all()
    found = token_loss(rows, ratio="product", eps_low=widths[0], eps_high=widths[1], **SEQUENCES)
    same_policy_loss(found, peer.rloo_loss(rows, epsilon_low=widths[0], epsilon_high=widths[1]))


def test_the_first_step_is_on_policy():
    """Without old log-probabilities TRL takes the present ones: ratios of 1."""
    rows = sample(2)
    theirs = peer.token_loss(rows, inputs={"old_per_token_logps": None}, loss_type="dapo")
    same_policy_loss(token_loss(rows._replace(old=rows.logp)), theirs)


def test_the_divergence_weighted_by_the_ratio():
    rows = sample(3)

    def loss(logp):
        each = losses.ppo_clip(logp, rows.old, np.broadcast_to(rows.adv[:, None], logp.shape), mask=rows.mask)
        each += 0.1 * losses.kl(logp, rows.ref, estimator="k3", mask=rows.mask, logp_old=rows.old)
        return aggregate(each, rows.mask, "token-mean")

    theirs = peer.token_loss(rows, beta=0.1, use_bias_correction_kl=True, loss_type="bnpo")
    agree(differentiate(loss, rows.logp), theirs._replace(grads=theirs.grads[:1]))


def test_clip_fractions_entropy_and_divergence_as_logged():
    rows = sample(4)
    theirs = peer.token_loss(rows, beta=0.1, epsilon_low=0.1, epsilon_high=0.28).metrics
    algorithm = compose(kl="k3", eps_low=0.1, eps_high=0.28, **SEQUENCES)
    _, metrics = objective(algorithm, batch_of(rows))(jnp.asarray(rows.logp), jnp.asarray(rows.entropy))
    names = {
        "clip_low": "clip_ratio/low_mean", "clip_high": "clip_ratio/high_mean", "entropy": "entropy", "kl": "kl"
    }  # fmt: skip
    for mine, other in names.items():
        total, count = metrics[mine]
        assert theirs[other] > 0
        np.testing.assert_allclose(total / count, theirs[other], rtol=1e-5)
    cut = losses.clipped(
        rows.logp, rows.old, np.broadcast_to(rows.adv[:, None], (B, T)), eps_low=0.1, eps_high=0.28, mask=rows.mask
    )
    both = aggregate((cut.low | cut.high).astype(np.float32), rows.mask, "token-mean")
    np.testing.assert_allclose(both, theirs["clip_ratio/region_mean"], rtol=1e-5)


@pytest.mark.parametrize("kind, keywords", [
    ("grpo", SEQUENCES), ("dr_grpo", {"aggregation": "seq-mean-token-sum-norm", "norm": 16}),
    ("luspo", {"aggregation": "seq-mean-token-sum"}), ("bnpo", {}), ("dapo", {}),
])  # fmt: skip
def test_deviation_a_row_without_loss_tokens_leaves_the_mean_over_sequences(kind, keywords):
    """TRL divides by all B rows, this package by those with a token; means over tokens are the same."""
    rows = sample(5)
    rows.mask[[2, 5]] = False
    value, grads = token_loss(rows, **keywords)
    share = 1.0 if kind in ("bnpo", "dapo") else (B - 2) / B
    same_policy_loss((value * share, tuple(x * share for x in grads)), peer.token_loss(rows, loss_type=kind))


# Entropy


@pytest.mark.parametrize("kind", ["bnpo", "dapo"])
def test_the_entropy_bonus_of_means_over_tokens(kind):
    """TRL's bonus is a mean over tokens whatever the loss; here it has the loss's aggregation: these two agree."""
    rows = sample(6)
    theirs = peer.token_loss(
        rows, loss_type=kind, _entropy_bonus_enabled=True, use_adaptive_entropy=False, entropy_coef=0.05
    )
    agree(token_loss(rows, entropy_coef=0.05), theirs)


def test_the_adaptive_entropy_coefficient():
    """Skywork-OR1's controller; a coefficient found in one step is applied in the next."""
    rows, coef = sample(7), jnp.float32(0.01)
    spread = rows.entropy[rows.mask].mean()
    trainer, _ = peer.token_trainer(
        rows, loss_type="bnpo", _entropy_bonus_enabled=True, use_adaptive_entropy=True, entropy_coef=0.01,
        entropy_target=float(spread), entropy_coef_delta=0.006, entropy_coef_min=0.0, entropy_coef_max=1.0,
        _last_world_entropy=0.0, _entropy_window_stats=None,
    )  # fmt: skip
    for observed in (0.9, 0.8, 1.2, 1.1, 1.3, 1.4, 0.7):
        scores = peer.leaf(rows.logp), peer.leaf(rows.entropy * observed), None
        trainer._get_per_token_logps_and_entropies = lambda *_, scores=scores, **__: scores
        trainer._compute_loss(None, peer.token_inputs(rows))
        coef, applied = statistics.adaptive_entropy(coef, observed * spread, target=spread, step=0.006)
        np.testing.assert_allclose(coef, trainer.entropy_coef, atol=1e-7)
        assert (applied > 0) == (trainer._last_world_entropy <= spread)


@pytest.mark.parametrize("fraction", [0.2, 0.5])
def test_deviation_at_most_one_more_of_the_uncertain_tokens(fraction):
    """TRL keeps what reaches an interpolated quantile, ``floor(fraction (n - 1)) + 1`` tokens of n; this package
    ``floor(fraction n)``, the same or one fewer. The others stay in the denominator of both."""
    rows = sample(8)
    count = rows.mask.sum()
    kept = np.floor(fraction * (count - 1)) + 1
    keep = top_entropy_mask(rows.entropy, rows.mask, fraction=kept / count)
    assert keep.sum() == kept
    assert top_entropy_mask(rows.entropy, rows.mask, fraction=fraction).sum() == np.floor(fraction * count)
    theirs = peer.token_loss(rows, loss_type="dapo", top_entropy_quantile=fraction)
    same_policy_loss(token_loss(rows, gate=keep.astype(jnp.float32)), theirs)


# Samplers that are not the trainer


@pytest.mark.parametrize("delta", [0.0, 0.1])
def test_off_policy_sequences_are_masked(delta):
    rows = sample(9)
    # Some rows have drifted from their sampler as a whole.
    rows = rows._replace(behaviour=rows.behaviour + np.linspace(-0.4, 0.6, B, dtype=np.float32)[:, None])
    adv = np.broadcast_to(rows.adv[:, None], (B, T))
    keep = importance.offpolicy_keep(rows.logp, rows.behaviour, adv, rows.mask, delta=delta)
    assert 0 < keep.sum() < B
    gate = jnp.broadcast_to(keep[:, None], (B, T)).astype(jnp.float32)
    theirs = peer.token_loss(rows, off_policy_mask_threshold=delta, beta=0.1)
    same_policy_loss(token_loss(rows, gate=gate, kl="k3", kl_coef=0.1, **SEQUENCES), theirs)


@pytest.mark.parametrize("unknown", [False, True], ids=["known", "some unknown"])
@pytest.mark.parametrize("level, low, high", [("token", 0.9, 1.1), ("sequence", 0.7, 1.4)])
@pytest.mark.parametrize("rule", ["truncate", "mask"])
def test_weights_for_the_samplers_probabilities(level, low, high, rule, unknown):
    """TRL's from ``_generate_and_score_completions``, and its loss with them. A token of unknown probability enters no
    product; then it has weight 1 here, in TRL that of its sequence."""
    rows = sample(10)
    settings = {
        "use_vllm": True, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": high, "vllm_importance_sampling_mode": f"{level}_{rule}",
    }  # fmt: skip
    known = np.ones((B, T), bool)
    if unknown:
        known[[0, 3], [0, 2]] = False
    rows = rows._replace(behaviour=np.where(known, rows.behaviour, np.nan))
    inputs = peer.collected(rows, np.zeros((B, 1)), **settings)
    theirs = np.broadcast_to(inputs["importance_sampling_ratio"].numpy(), (B, T))
    weight = importance.importance_weight(
        rows.old, rows.behaviour, rows.mask, level=level, rule=rule, low=low, high=high, known=known
    )
    read = rows.mask & known
    assert len(np.unique(theirs[read])) > 3
    np.testing.assert_allclose(weight[read], theirs[read], rtol=1e-5)
    np.testing.assert_array_equal(weight[rows.mask & ~known], 1.0)
    weight = jnp.where(known, weight, theirs)
    inputs = {"importance_sampling_ratio": inputs["importance_sampling_ratio"]}
    found = token_loss(rows, gate=weight, kl="k3", kl_coef=0.1)
    same_policy_loss(found, peer.token_loss(rows, inputs=inputs, beta=0.1, loss_type="dapo", **settings))


# Advantages

REWARDS = np.random.default_rng(0).normal(size=(2, B)).astype(np.float32)
REWARDS[1, 4:] = 1.0
GROUP = np.repeat([0, 1], 4)


@pytest.mark.parametrize("missing", [(), (1,), (1, 2, 3)], ids=["all", "one without reward", "one left"])
@pytest.mark.parametrize("scale, theirs", [("std", "group"), ("batch", "batch"), ("none", "none")])
@pytest.mark.parametrize("which", [0, 1], ids=["varied", "one group of equals"])
def test_group_relative_advantages(which, scale, theirs, missing):
    """In TRL a row without any reward enters no statistic and gets 0: ``where``."""
    reward = REWARDS[which].copy()
    reward[list(missing)] = np.nan
    found = groups.group_relative(reward, GROUP, 2, scale=scale, eps=1e-4, where=~np.isnan(reward))
    out = peer.collected(sample(), reward[:, None], scale_rewards=theirs)
    np.testing.assert_allclose(found, out["advantages"], atol=1e-5)


def test_gdpo_normalises_each_reward():
    weights = np.asarray([1.0, 0.5], np.float32)
    found = groups.gdpo(REWARDS.T, weights, GROUP, 2, eps=1e-4)
    out = peer.collected(
        sample(), REWARDS.T, multi_objective_aggregation="normalize_then_sum", reward_weights=peer.tensor(weights)
    )
    np.testing.assert_allclose(found, out["advantages"], atol=1e-5)


@pytest.mark.parametrize("missing", [(), (1,), (1, 2, 3)], ids=["all", "one without reward", "one left"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("normalise", [False, True])
def test_leave_one_out_with_the_divergence_in_the_reward(normalise, beta, missing):
    rows, reward = sample(11, tools=False), REWARDS[0].copy()
    reward[list(missing)] = np.nan
    known = ~np.isnan(reward)
    penalty = masked_sum(losses.kl(rows.old, rows.ref, estimator="k1", mask=rows.mask), rows.mask, -1)
    found = groups.leave_one_out(reward - beta * penalty, GROUP, 2, where=known)
    if normalise:
        # A lone row has no others: NaN in TRL, which its deviation leaves out; 0 here.
        lone = np.asarray([known[GROUP == g].sum() == 1 for g in GROUP])
        found = groups.group_relative(found, np.zeros(B, int), 1, eps=1e-4, where=known & ~lone)
    out = peer.collected(rows, reward[:, None], peer.RLOO, beta=beta, normalize_advantages=normalise)
    np.testing.assert_allclose(found, out["advantages"], atol=1e-5)


# Preferences between pairs


def as_pairs(x):
    """``[2 P, ...] -> [P, 2, 1, ...]``: the chosen stand first in TRL's batches."""
    return jnp.stack([jnp.asarray(x)[:PAIRS], jnp.asarray(x)[PAIRS:]], 1)[:, :, None]


def pair_loss(rows, **keywords):
    """``prefer``'s loss of the rows and its gradient by log-probabilities."""
    batch = jax.tree.map(as_pairs, batch_of(rows))
    loss = objective(prefer(**keywords), batch)
    return differentiate(lambda logp: loss(as_pairs(logp), as_pairs(rows.entropy))[0], rows.logp)


def by_margin(rows, fn, *, average=False, **numbers):
    """The mean of a function of ``(logp_w, logp_l, ref_w, ref_l)``, and its gradient by log-probabilities."""
    sides = lambda x: jnp.split(preference.sequence_logp(x, rows.mask, average=average), 2)  # noqa: E731
    return differentiate(lambda logp: jnp.mean(fn(*sides(logp), *sides(rows.ref), **numbers)), rows.logp)


@pytest.mark.parametrize("beta", [0.1, 0.8])
@pytest.mark.parametrize("kind, loss", [("sigmoid", "dpo"), ("hinge", "hinge"), ("ipo", "ipo"), ("robust", "robust")])
def test_dpo_and_its_variants(kind, loss, beta):
    """IPO is on means, as in TRL; "ipo-sum" is the paper's formula."""
    rows = sample(12)
    theirs = peer.dpo_loss(rows, kind, beta=beta, label_smoothing=0.1 if kind == "robust" else 0.0)
    agree(pair_loss(rows, loss=loss, beta=beta), theirs)


@pytest.mark.parametrize("noise", [0.0, 0.3, 0.45])
def test_robust_dpo_at_any_noise(noise):
    rows = sample(13)
    theirs = peer.dpo_loss(rows, "robust", beta=0.5, label_smoothing=noise)
    agree(by_margin(rows, preference.robust_dpo, beta=0.5, label_noise=noise), theirs)


def test_dpo_on_means_is_the_length_normalised_form():
    rows = sample(14)
    agree(by_margin(rows, preference.dpo, average=True, beta=2.0), peer.dpo_loss(rows, "sigmoid_norm", beta=2.0))


def test_deviation_smoothed_labels_are_not_in_trls_sigmoid_but_in_its_aot():
    """TRL's "sigmoid" ignores the smoothing. Its "aot" has it, on sorted log-ratios: one pair alone is in order, and
    gets conservative DPO."""
    rows = sample(15)
    plain = peer.dpo_loss(rows, "sigmoid", label_smoothing=0.2, beta=0.5)
    agree(pair_loss(rows, loss="dpo", beta=0.5), plain)
    pair = peer.Rows(*(x[[0, PAIRS]] for x in rows))
    smooth = peer.dpo_loss(pair, "aot", label_smoothing=0.2, beta=0.5)
    agree(by_margin(pair, preference.dpo, beta=0.5, label_smoothing=0.2), smooth)


def test_dpo_with_the_chosens_likelihood_at_equal_lengths():
    rows = sample(16, tools=False, lengths=np.asarray([6, 6, 6, 6, 12, 9, 3, 7]))
    theirs = peer.dpo_loss(rows, "sigmoid", "sft", weights=(1.0, 0.5))
    agree(pair_loss(rows, loss="dpo-nll", nll_coef=0.5), theirs)


def test_deviation_trls_likelihood_is_a_mean_over_tokens_not_over_pairs():
    rows = sample(17)
    theirs = peer.dpo_loss(rows, "sigmoid", "sft", weights=(1.0, 0.5))
    dpo, (by_dpo,) = by_margin(rows, preference.dpo)
    chosen = rows.mask & (np.arange(B) < PAIRS)[:, None]
    nll, (by_nll,) = differentiate(lambda x: aggregate(imitation.nll(x, mask=chosen), chosen, "token-mean"), rows.logp)
    agree((dpo + 0.5 * nll, (by_dpo + 0.5 * by_nll,)), theirs)


@pytest.mark.parametrize("kind, loss", [("sigmoid", "dpo"), ("ipo", "ipo-sum")])
def test_online_dpo_pairs_the_best_with_the_worst(kind, loss):
    """Two samples a prompt, and IPO on sums as the paper has it."""
    rows, reward = sample(18, tools=False), REWARDS[0]
    group = np.arange(B) % PAIRS
    batch = batch_of(rows)
    paid = np.zeros((B, T))
    paid[:, 0] = reward
    batch = batch._replace(traj=trajectory(rows.mask, group=group, reward=paid))
    tools = tools_of(batch.traj, groups=PAIRS, group_size=2)

    def ours(logp):
        moved = batch._replace(extra=batch.extra | {"logp": logp})
        _, pairs, _ = stages.best_against_worst()(None, moved, tools, {}, jax.random.key(0))
        logp = pairs.extra["logp"]
        return objective(prefer(loss=loss, beta=0.3), pairs)(logp, jnp.zeros_like(logp))[0]

    agree(differentiate(ours, rows.logp), peer.online_loss(rows, reward, kind, 0.3))


# Preferences between logits, without a reference


def texts(seed):
    """Pairs of a prompt and a ragged response each, as ids and logits."""
    rng = np.random.default_rng(seed)
    place, prompt = np.arange(T), rng.integers(1, 4, B)[:, None]
    stop = prompt + rng.integers(1, 8, B)[:, None]
    ids = rng.integers(0, VOCAB, (B, T))
    return peer.Texts(
        rng.normal(size=(B, T, VOCAB)).astype(np.float32), ids, place < stop, (place >= prompt) & (place < stop)
    )


def by_logits(pairs, fn, *, average):
    """The mean of ``fn(logp_w, logp_l, nll, nll of the response alone)``, and its gradient by the logits. The two
    likelihoods of the chosen are means over the tokens of the batch."""

    def loss(logits):
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), jnp.asarray(pairs.ids)[:, 1:, None], 2)[..., 0]
        sides = jnp.split(preference.sequence_logp(logp, pairs.response[:, 1:], average=average), 2)
        nll = lambda mask: aggregate(-logp[:PAIRS], mask[:PAIRS, 1:], "token-mean")  # noqa: E731
        return jnp.mean(fn(*sides, nll(pairs.attention), nll(pairs.response)))

    return differentiate(loss, pairs.logits)


@pytest.mark.parametrize("seed", [0, 1])
def test_orpo_with_a_likelihood_of_prompt_and_response(seed):
    """TRL's supervised term counts the prompt, over the tokens of the batch; here it is given as ``nll``."""
    pairs = texts(seed)
    theirs = peer.logits_loss(pairs, peer.ORPO, beta=0.2)
    agree(
        by_logits(pairs, lambda won, lost, both, _: preference.orpo(won, lost, coef=0.2, nll=both), average=True),
        theirs,
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_cpo_with_a_likelihood_over_the_tokens_of_the_batch(seed):
    pairs = texts(seed)
    theirs = peer.logits_loss(pairs, peer.CPO, beta=0.3, cpo_alpha=0.7)
    agree(
        by_logits(pairs, lambda won, lost, _, nll: preference.cpo(won, lost, nll, beta=0.3, coef=0.7), average=False),
        theirs,
    )


@pytest.mark.parametrize("beta, gamma", [(2.0, 0.5), (2.5, 1.4)])
def test_simpo(beta, gamma):
    pairs = texts(2)
    theirs = peer.logits_loss(pairs, peer.CPO, loss_type="simpo", beta=beta, simpo_gamma=gamma)
    agree(
        by_logits(pairs, lambda won, lost, *_: preference.simpo(won, lost, beta=beta, gamma=gamma), average=True),
        theirs,
    )


def test_smoothed_labels_of_cpo_are_conservative_dpo_without_a_reference():
    pairs = texts(3)
    theirs = peer.logits_loss(pairs, peer.CPO, beta=0.5, label_smoothing=0.2)
    smooth = lambda won, lost, *_: preference.dpo(won, lost, 0.0, 0.0, beta=0.5, label_smoothing=0.2)  # noqa: E731
    agree(by_logits(pairs, smooth, average=False), theirs)


# Single responses, rewards, supervision

LABELS = {
    "both kinds": np.arange(B) % 3 != 0, "all desirable": np.ones(B, bool), "all undesirable": np.zeros(B, bool)
}  # fmt: skip


def unpaired_loss(rows, desirable, reference, **numbers):
    batch = batch_of(rows)
    more = {"desirable": jnp.asarray(desirable), "kto_reference": jnp.full(B, reference)}
    loss = objective(unpaired(), batch._replace(extra=batch.extra | more), **numbers)
    return differentiate(lambda logp: loss(logp, jnp.zeros_like(logp))[0], rows.logp)


@pytest.mark.parametrize("drift", [0.5, -0.5], ids=["positive point", "point of 0"])
@pytest.mark.parametrize("labels", LABELS)
def test_kto(labels, drift):
    rows, other = sample(19), sample(20)
    other = other._replace(ref=other.logp - drift)
    point = preference.kto_reference(*(preference.sequence_logp(x, other.mask) for x in (other.logp, other.ref)))
    assert (point > 0) == (drift > 0)
    theirs = peer.kto_loss(rows, other, LABELS[labels], beta=0.3, desirable_weight=1.0, undesirable_weight=1.33)
    np.testing.assert_allclose(point, theirs.metrics["kl"], rtol=1e-5)
    found = unpaired_loss(rows, LABELS[labels], point, beta=0.3, weight_undesirable=1.33)
    agree(found, theirs)


def test_kto_with_a_reference_point_of_0_is_apo_zero():
    rows = sample(21)
    labels = LABELS["both kinds"]
    theirs = peer.kto_loss(rows, rows, labels, loss_type="apo_zero_unpaired", calculate_KL=False)
    agree(unpaired_loss(rows, labels, 0.0), theirs)


@pytest.mark.parametrize("margin", [False, True])
@pytest.mark.parametrize("centre", [None, 0.01])
def test_the_reward_models_loss(margin, centre):
    reward, gap = sample(22).adv, np.asarray([0.0, 0.5, 1.0, 2.0], np.float32) if margin else None

    def loss(reward):
        won, lost = jnp.split(reward, 2)
        return jnp.mean(
            preference.bradley_terry(won, lost, label_margin=0.0 if gap is None else gap, centre_coef=centre or 0.0)
        )

    theirs = peer.reward_loss(reward, gap, centre)
    agree(differentiate(loss, reward), theirs._replace(grads=(theirs.grads[0][:, 0],)))


@pytest.mark.parametrize("kind", ["nll", "dft"])
def test_supervised_losses(kind):
    rows = sample(23)
    loss = lambda x: aggregate(getattr(imitation, kind)(x, mask=rows.mask), rows.mask, "token-mean")  # noqa: E731
    agree(differentiate(loss, rows.logp), peer.sft_loss(rows, kind))


def test_entropies_and_their_gradient():
    logits, weight = texts(24).logits, sample(24).logp
    agree(differentiate(lambda x: jnp.sum(entropy(x) * weight), logits), peer.entropies(logits, weight))


def test_the_whole_divergence_is_distillations():
    logits, teacher = texts(25).logits, texts(26).logits
    found = differentiate(lambda x: jnp.sum(full_kl(x, teacher)) / B, logits)
    agree(found, peer.divergence(logits, teacher))


def test_the_soft_punishment_of_long_responses():
    lengths = [1, 79, 80, 81, 95, 100, 101, 120]
    found = selection.soft_overlong(np.asarray(lengths), max_length=100, buffer=20)
    np.testing.assert_allclose(found, peer.overlong(lengths, 100, 20), atol=1e-6)
