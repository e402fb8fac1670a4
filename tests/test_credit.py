"""Advantage parts: each against its formula, and the properties that hold for all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conversations import TURNS, T, conversations, joined, order, run, split, tools_of, with_gap

from agentrl_jax import credit, objectives, shaping, stages
from agentrl_jax.surrogates import surrogate
from agentrl_jax.types import Score

CRITIC = ("gae", "turn_gae", "bilevel_gae", "vapo_gae", "vtrace")
RELATIVE = (
    "group", "own_group", "leave_one_out", "length_weighted", "gpg", "gdpo", "pass_at_k", "max_at_k", "best_gap",
    "gigpo", "turn_relative", "process_relative", "tag_relative", "optimal_token",
)  # fmt: skip
SHAPING = ("whiten", "entropy_shaped", "entropy_scaled", "aspo_shaped", "ktae_shaped")
EVERY = (*RELATIVE, "returns", "ones", *CRITIC, *SHAPING)
OPTIONS = {"pass_at_k": {"k": 2}, "max_at_k": {"k": 2}, "tag_relative": {"tag": "answered", "part": "malformed"}}


def part(name, **options):
    return getattr(shaping if name in SHAPING else credit, name)(**(OPTIONS.get(name, {}) | options))


def act(name, b, *, segments=1, **options):
    """``run`` of a part, scored by what the batch holds."""

    def score(view, of):
        return Score(of.logp_old, 0.5 * of.extra["entropy"], of.value, of.bootstrap)

    return run(part(name, **options), b, tools=tools_of(b, segments=segments, score=score))


def returns(b):
    return np.asarray(b.traj.reward).sum(1)


def binary(b):
    """The batch with returns of 0 and 1."""
    last = np.asarray([np.flatnonzero(row)[-1] for row in np.asarray(b.mask)])
    right = jnp.asarray([1.0, 0, 0, 1, 1, 0, 0, 0])
    return b._replace(traj=b.traj._replace(reward=jnp.zeros((8, T)).at[jnp.arange(8), last].set(right)))


def on_tokens(b, adv):
    """An advantage an episode, or one a turn, on the written tokens."""
    mask, turn = np.asarray(b.mask), np.asarray(b.traj.turn)
    adv = np.asarray(adv)
    each = adv[:, None] if adv.ndim == 1 else np.take_along_axis(adv, np.maximum(turn, 0), 1)
    return np.where(mask, each, 0)


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-5)


# Properties of all


@pytest.mark.parametrize("name", EVERY)
def test_a_restarted_episode_gives_what_the_whole_one_gives(name):
    b = conversations(1)
    whole, _ = act(name, b)
    halves, _ = act(name, split(b), segments=2)
    close(joined(halves.adv), whole.adv)
    close(joined(halves.target), whole.target)


@pytest.mark.parametrize("name", EVERY)
def test_observation_tokens_change_nothing_whatever_they_hold(name):
    b = conversations(2)
    plain, _ = act(name, b)
    wide, keep = with_gap(b)
    found, metrics = act(name, wide)
    close(np.asarray(found.adv)[:, keep], plain.adv)
    close(np.where(b.mask, np.asarray(found.target)[:, keep], 0), np.where(b.mask, plain.target, 0))
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(metrics))


@pytest.mark.parametrize("name", EVERY)
def test_permuted_episodes_give_permuted_advantages(name):
    b = conversations(3)
    index = np.random.default_rng(0).permutation(b.mask.shape[0])
    plain, _ = act(name, b)
    mixed, _ = act(name, order(b, index))
    close(mixed.adv, np.asarray(plain.adv)[index])


@pytest.mark.parametrize("name", [n for n in EVERY if n != "whiten"])
def test_what_a_filter_drops_still_counts_for_the_others(name):
    """The words that stay get what they would have got; whitening alone is of the words that are left."""
    b = conversations(3)
    if name == "pass_at_k":
        b = binary(b)
    if name == "aspo_shaped":
        # All are right and call the tool in their last turn; no bound hides by how much.
        last = b.traj.steps["played"] & ~jnp.pad(b.traj.steps["played"][:, 1:], ((0, 0), (0, 1)))
        steps = b.traj.steps | {"success": jnp.ones((8, TURNS)), "tool_calls": last.astype(jnp.float32)}
        b = b._replace(traj=b.traj._replace(steps=steps), adv=20.0 * b.adv)
    kept = b.mask & jnp.asarray([True, False, True, True, False, True, True, True])[:, None]
    every, _ = act(name, b)
    some, _ = act(name, b._replace(mask=kept, adv=jnp.where(kept, b.adv, 0.0)))
    close(np.where(kept, some.adv, 0), np.where(kept, every.adv, 0))
    assert np.abs(np.where(kept, every.adv, 0)).max() > 0.1


@pytest.mark.parametrize("name", ["length_weighted", "entropy_scaled", "aspo_shaped", "ktae_shaped"])
def test_words_of_the_expert_are_no_measure_of_the_policys_own(name):
    """How many they are, what they are, and how sure the policy would have been of them change nothing for it."""
    b = conversations(4, groups=(0,) * 8, expert=(2, 5))
    plain, _ = act(name, b)
    expert, own = b.traj.expert, np.asarray(b.mask & ~b.traj.expert)
    few = b.traj.mask & (~expert | (jnp.cumsum(b.traj.mask, 1) < 2))
    traj = b.traj._replace(mask=few, expert=expert & few, tokens=jnp.where(expert, 33, b.traj.tokens))
    extra = b.extra | {"entropy": jnp.where(expert, 9.0, b.extra["entropy"])}
    found, _ = act(name, b._replace(traj=traj, mask=b.mask & few, extra=extra, adv=jnp.where(few, b.adv, 0.0)))
    close(np.where(own, found.adv, 0), np.where(own, plain.adv, 0))
    theirs = np.asarray(expert & few)
    assert theirs.any() and np.isfinite(np.asarray(found.adv)[theirs]).all()
    if name != "length_weighted":
        close(np.where(theirs, found.adv, 0), np.where(theirs, b.adv, 0))


@pytest.mark.parametrize("name", [n for n in RELATIVE if n != "gdpo"])
def test_equal_returns_and_lone_members_give_exactly_zero(name):
    b = conversations(4, groups=(0, 0, 0, 1))
    last = np.asarray([np.flatnonzero(row)[-1] for row in np.asarray(b.mask)])
    reward = jnp.zeros((4, T)).at[jnp.arange(4), last].set(0.3)
    steps = b.traj.steps | {k: jnp.zeros((4, TURNS)) for k in ("tool_calls", "success")}
    # One turn each: else a reward at the end makes later turns differ from earlier ones.
    b = b._replace(traj=b.traj._replace(reward=reward, steps=steps))
    if name == "tag_relative":
        # Nor do turns under one tag differ in their part.
        b = b._replace(traj=b.traj._replace(steps=steps | {"malformed": jnp.full((4, TURNS), 0.3)}))
    if name in ("gigpo", "process_relative"):
        steps = steps | {"anchor": jnp.arange(4 * TURNS, dtype=jnp.uint32).reshape(4, TURNS)}
        reward = jnp.where(b.mask, 0.0, 0.0)
        b = b._replace(traj=b.traj._replace(steps=steps, reward=reward))
    found, _ = act(name, b)
    assert not np.asarray(found.adv).any()


def test_what_is_not_played_gets_nothing_and_counts_for_nobody():
    b = conversations(5)
    gone = b.traj._replace(
        length=b.traj.length.at[0].set(0), mask=b.traj.mask.at[0].set(False),
        steps=b.traj.steps | {"played": b.traj.steps["played"].at[0].set(False)},
        reward=b.traj.reward.at[0].set(0), turn=b.traj.turn.at[0].set(-1),
    )  # fmt: skip
    less = b._replace(traj=gone, mask=b.mask.at[0].set(False))
    for name in RELATIVE:
        found, _ = act(name, less)
        rest, _ = act(name, order(b, range(1, 8)))
        close(found.adv[1:], rest.adv)
        assert not np.asarray(found.adv[0]).any()


# Each against its formula


def test_turn_rewards_lose_nothing():
    b = conversations(6)
    found = credit.turn_rewards(b, tools_of(b))
    close(found, b.traj.steps["reward"])
    close(credit.turn_rewards(split(b), tools_of(split(b), segments=2)), found)
    assert (np.asarray(credit.played_turns(b, tools_of(b))) == np.asarray(b.traj.steps["played"])).all()


GROUPS = np.asarray((0, 0, 0, 1, 1, 1, 2, 2))


@pytest.mark.parametrize(
    "name, options, oracle",
    [
        ("group", {}, lambda b: oracles.group_relative(returns(b), GROUPS)),
        ("group", {"scale": "none"}, lambda b: oracles.group_relative(returns(b), GROUPS, scale="none")),
        ("group", {"scale": "batch", "ddof": 0}, lambda b: oracles.group_relative(returns(b), GROUPS, "batch", 0)),
        ("own_group", {}, lambda b: oracles.group_relative(returns(b), GROUPS)),
        ("leave_one_out", {}, lambda b: oracles.leave_one_out(returns(b), GROUPS)),
        ("length_weighted", {}, lambda b: oracles.length_weighted(returns(b), np.asarray(b.mask).sum(1), GROUPS)),
        ("gpg", {}, lambda b: oracles.gpg(returns(b), GROUPS)),
        ("max_at_k", {}, lambda b: oracles.max_at_k_advantage(returns(b), GROUPS, 2)),
        (
            "gigpo",
            {"scale": "std"},
            lambda b: oracles.gigpo(
                np.asarray(b.traj.steps["reward"]), np.asarray(b.traj.steps["anchor"]).astype(int),
                np.asarray(b.traj.steps["played"]), GROUPS, 0.95, 1.0, "std",
            ),
        ),
    ],
)  # fmt: skip
def test_an_estimate_is_its_formula_on_every_written_token(name, options, oracle):
    for seed in range(3):
        b = conversations(seed)
        found, _ = run(part(name, **options), b)
        close(found.adv, on_tokens(b, oracle(b)))


def test_pass_at_k_reads_binary_returns():
    b = binary(conversations(7))
    found, _ = run(credit.pass_at_k(k=2), b)
    close(found.adv, on_tokens(b, oracles.pass_at_k_advantage(returns(b).astype(int), GROUPS, 2)))


def test_expert_episodes_are_measured_by_the_policys_own():
    b = conversations(8, expert=(2, 5))
    found, _ = run(credit.own_group(), b)
    ret = returns(b)
    for group in (0, 1):
        own = ret[[i for i in range(8) if GROUPS[i] == group and i not in (2, 5)]]
        for i in np.flatnonzero(GROUPS == group):
            expected = (ret[i] - own.mean()) / ((own.std(ddof=1) or 1.0) + 1e-6)
            close(np.asarray(found.adv)[i][np.asarray(b.mask)[i]], expected)


def test_an_expert_that_differs_from_equals_is_one_better_not_a_million():
    b = conversations(8, expert=(2, 5))
    last = np.asarray([np.flatnonzero(row)[-1] for row in np.asarray(b.mask)])
    values = jnp.asarray([0.7, 0.7, 1.7, 0.0, 0.0, 1.0, 0.3, 0.3], jnp.float32)
    b = b._replace(traj=b.traj._replace(reward=jnp.zeros((8, T)).at[jnp.arange(8), last].set(values)))
    found, _ = run(credit.own_group(), b)
    close(found.adv, on_tokens(b, np.asarray([0, 0, 1, 0, 0, 1, 0, 0])))


def test_turn_level_advantages_add_the_turns_own():
    """K = 2 by hand, as the paper's code."""
    b = conversations(9, groups=(0,) * 8)
    found, _ = run(credit.turn_relative(part="tool_calls"), b, turn_coef=0.5)
    played, calls = np.asarray(b.traj.steps["played"]), np.asarray(b.traj.steps["tool_calls"])
    ret, turns = returns(b), played.sum(1)
    norm = lambda x, who: np.where(who, (x - x[who].mean()) / (x[who].std(ddof=1) + 1e-4), 0.0)  # noqa: E731
    every = np.ones(8, bool)
    adv = np.repeat(norm(ret, every)[:, None], TURNS, 1)
    adv[turns == 1] = norm(ret + (calls * played).sum(1), every)[turns == 1, None]
    for k in range(TURNS):
        early = turns > k + 1
        if early.sum() > 1 and np.ptp(calls[early, k]) > 0:
            adv[:, k] += 0.5 * norm(calls[:, k], early)
    close(found.adv, on_tokens(b, adv))


def rows(b, fn):
    """``fn(reward, value, mask, turn, logp_old, logp, bootstrap)`` a row, ``(adv, target)``."""
    out = []
    for i in range(b.mask.shape[0]):
        pick = lambda x, i=i: np.asarray(x[i], np.float64 if x.dtype.kind == "f" else None)  # noqa: E731
        boot = float(b.bootstrap[i]) if bool(b.traj.truncated[i]) else 0.0
        out.append(
            fn(*(pick(x) for x in (b.traj.reward, b.value, b.traj.mask, b.traj.turn, b.logp_old, b.traj.logp)), boot)
        )
    return tuple(np.stack(x) for x in zip(*out, strict=True))


ACTORS = {
    "gae": lambda r, v, m, t, o, beh, b: oracles.gae(r, v, m, 1.0, 0.95, b),
    "bilevel_gae": lambda r, v, m, t, o, beh, b: oracles.turn_gae(r, v, m, t, 0.95, 1.0, 1.0, 1.0, True, b),
    "vapo_gae": lambda r, v, m, t, o, beh, b: (
        oracles.gae(r, v, m, 1.0, max(0.0, 1 - 1 / (0.05 * m.sum())), b)[0], oracles.gae(r, v, m, 1.0, 1.0, b)[1],
    ),
    "vtrace": lambda r, v, m, t, o, beh, b: oracles.vtrace(r, v, o, beh, m, 1.0, bootstrap=b),
}  # fmt: skip


def test_a_critic_has_a_lambda_of_its_own_where_asked_for():
    b = conversations(10)
    found, _ = run(credit.gae(lambda_critic=0.5), b)
    adv, target = rows(
        b, lambda r, v, m, t, o, beh, b: (oracles.gae(r, v, m, 1.0, 0.95, b)[0], oracles.gae(r, v, m, 1.0, 0.5, b)[1])
    )
    close(found.adv, adv)
    close(np.where(b.mask, found.target, 0), np.where(b.mask, target, 0))
    plain, _ = run(credit.gae(), b)
    assert np.abs(np.asarray(plain.target - found.target))[np.asarray(b.mask)].max() > 0.1


@pytest.mark.parametrize("name", ACTORS)
def test_a_critics_estimate_is_its_formula(name):
    b = conversations(10)
    found, _ = run(part(name), b)
    adv, target = rows(b, ACTORS[name])
    close(found.adv, adv)
    close(np.where(b.mask, found.target, 0), np.where(b.mask, target, 0))


def test_turn_wise_gae_trains_the_critic_at_turn_ends_alone():
    b = conversations(11)
    found, _ = run(credit.turn_gae(), b)
    ends = np.asarray(found.extra["value_mask"])
    assert (ends.sum(1) == np.asarray(b.traj.steps["played"]).sum(1)).all() and not (ends & ~np.asarray(b.mask)).any()
    weigh = objectives.weigh_tokens("token-mean")(found, {}, 1)
    np.testing.assert_allclose(weigh.extra["value_weight"], ends / ends.sum(), rtol=1e-5)
    score = Score(b.logp_old, jnp.zeros_like(b.adv), found.value + 0.1, b.bootstrap)
    hyper = {
        k: jnp.float32(v) for k, v in {"eps_low": 0.2, "eps_high": 0.2, "value_coef": 0.5, "value_eps": 9.0}.items()
    }
    loss = lambda critic: objectives.token_objective(surrogate("token", "ppo").surrogate, critic=critic)  # noqa: E731
    both = [loss(critic)({"policy": score}, weigh, hyper)[0] for critic in (True, False)]
    error = 0.5 * (np.asarray(score.value) - np.asarray(found.target)) ** 2
    np.testing.assert_allclose(both[0] - both[1], 0.5 * error[ends].mean(), rtol=1e-4)
    assert (np.diff(np.where(np.asarray(b.mask), np.asarray(b.traj.turn), -1)[0][np.asarray(b.mask)[0]]) >= 0).all()


def test_one_makes_the_policy_gradient_a_likelihood():
    b = conversations(12)
    found, _ = run(credit.ones(), b)
    np.testing.assert_array_equal(found.adv, np.asarray(b.mask, np.float32))


# Shaping


def test_entropy_never_flips_a_sign():
    b = conversations(13)
    found, _ = run(shaping.entropy_shaped(), b)
    old, entropy = np.asarray(b.adv), np.asarray(b.extra["entropy"])
    close(found.adv, np.where(b.mask, old + np.minimum(0.4 * entropy, np.abs(old) / 2), 0))
    assert (np.sign(found.adv) == np.sign(old)).all()


def test_a_sure_answer_counts_more():
    b = conversations(14)
    found, _ = run(shaping.entropy_scaled(), b)
    mask, entropy = np.asarray(b.mask), np.asarray(b.extra["entropy"])
    mean = (entropy * mask).sum(1) / mask.sum(1)
    factor = np.asarray([mean[GROUPS == GROUPS[i]].mean() / mean[i] for i in range(8)]).clip(0.1, 10)
    close(found.adv, on_tokens(b, np.asarray(b.adv)[:, 2] * factor))


def test_earlier_calls_of_right_answers_are_preferred():
    b = conversations(15, groups=(0,) * 8)
    found, _ = run(shaping.aspo_shaped(), b)
    calls, mask, turn = (np.asarray(x) for x in (b.traj.steps["tool_calls"], b.mask, b.traj.turn))
    right, old = np.asarray(b.traj.steps["success"]).sum(1) > 0, np.asarray(b.adv)[:, 2]
    who = right & calls.any(1)
    first = calls.argmax(1)
    said = np.asarray([(mask[i] & (turn[i] < first[i])).sum() for i in range(8)])
    bias = -2.0 * (said - said[who].mean()) / mask.sum(1)[who].mean() if who.any() else np.zeros(8)
    expected = np.where(who, old + np.clip(bias, -0.7 * np.abs(old), 0.7 * np.abs(old)), old)
    close(found.adv, on_tokens(b, expected))
    assert who.sum() > 1


def test_key_tokens_are_added_where_they_stand():
    b = conversations(16, groups=(0,) * 8)
    found, metrics = run(shaping.ktae_shaped(), b)
    tokens, mask = np.asarray(b.traj.tokens), np.asarray(b.mask)
    right = np.asarray(b.traj.steps["success"]).sum(1) > 0
    holds = [set(tokens[i][mask[i]]) for i in range(8)]
    for i in range(8):
        for t in np.flatnonzero(mask[i]):
            has = np.asarray([tokens[i, t] in held for held in holds])
            counts = [(has & right).sum(), (has & ~right).sum(), (~has & right).sum(), (~has & ~right).sum()]
            close(found.adv[i, t] - b.adv[i, t], oracles.ktae_key(*counts))
    assert metrics["key_token"][1] == mask.sum()


def test_options_are_refused_by_name():
    for make, message in [
        (lambda: credit.gigpo(scale="batch"), "Unknown scale 'batch'"),
        (lambda: credit.pass_at_k(k=0), "k must be above 0"),
        (lambda: credit.gdpo(parts=("a",), weights=(1.0, 2.0)), "as many weights as parts, got 2 and 1"),
        (lambda: credit.gae(lambda_critic=1.5), r"lambda_critic must be in \[0, 1\], got 1.5"),
        (lambda: credit.own_group(scale="x"), "Unknown scale 'x'"),
        (lambda: stages.return_to_go("mean"), "baseline must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
