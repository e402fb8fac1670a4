"""What is left out: which episodes and tokens a filter drops, re-draws or weighs down."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conversations import TURNS, T, conversations, joined, run, split, tools_of, with_gap

from agentrl_jax import filters
from agentrl_jax.types import Score

GROUPS = np.asarray((0, 0, 0, 1, 1, 1, 2, 2))


def kept(out):
    return np.asarray(out.mask).any(1)


def paid(b, values):
    """The batch with these returns, all paid by the environment at the first turn."""
    first = np.asarray(b.mask).argmax(1)
    reward = jnp.zeros((8, T)).at[jnp.arange(8), first].set(jnp.asarray(values, jnp.float32))
    steps = b.traj.steps | {"reward": jnp.zeros((8, TURNS)).at[:, 0].set(jnp.asarray(values, jnp.float32))}
    return b._replace(traj=b.traj._replace(reward=reward, steps=steps))


def test_groups_of_equals_are_dropped():
    b = paid(conversations(0), [1, 1, 1, 0, 1, 0, 0.5, 0.5])
    out, metrics = run(filters.varied(), b)
    np.testing.assert_array_equal(kept(out), GROUPS == 1)
    assert metrics["kept_varied"] == (3, 8)
    # A penalty of a stage is no difference that the environment saw.
    shaped = b._replace(traj=b.traj._replace(reward=b.traj.reward + 0.1 * jnp.arange(8.0)[:, None] * b.mask))
    np.testing.assert_array_equal(kept(run(filters.varied(), shaped)[0]), GROUPS == 1)


def test_cut_episodes_are_dropped():
    b = conversations(1)
    out, _ = run(filters.complete(), b)
    np.testing.assert_array_equal(kept(out), ~np.asarray(b.traj.truncated))


def test_the_most_uncertain_groups_stay():
    b = paid(conversations(2), [1, 0, 1, 0.4, 0.5, 0.6, 1, 1])
    np.testing.assert_array_equal(kept(run(filters.uncertain(), b, uncertain_fraction=0.34)[0]), GROUPS == 0)
    np.testing.assert_array_equal(kept(run(filters.uncertain(), b, uncertain_fraction=0.7)[0]), GROUPS < 2)
    np.testing.assert_array_equal(kept(run(filters.uncertain_mass(), b, uncertain_mass=0.5)[0]), GROUPS == 0)


def test_the_best_of_a_group_stays_unless_it_is_the_worst_there_is():
    b = paid(conversations(3), [0, 1, 1, 0, 0, 0, 0, 2])
    np.testing.assert_array_equal(kept(run(filters.best_of_group(), b)[0]), np.isin(np.arange(8), (1, 7)))


def test_successes_stay():
    b = conversations(4)
    right = np.asarray(b.traj.steps["success"]).sum(1) > 0
    np.testing.assert_array_equal(kept(run(filters.correct(), b)[0]), right)
    mark = run(filters.mark_correct(), b)[0].extra["correct"]
    np.testing.assert_array_equal(mark, np.repeat(right[:, None], T, 1))


def test_groups_that_are_all_right_are_dropped():
    b = conversations(4)
    success = jnp.zeros((8, TURNS)).at[:, 0].set(jnp.asarray([1.0, 1, 1, 0, 1, 0, 0, 0]))
    b = b._replace(traj=b.traj._replace(steps=b.traj.steps | {"success": success}))
    out, metrics = run(filters.not_all_correct(), b)
    np.testing.assert_array_equal(kept(out), GROUPS > 0)
    assert metrics["kept_not_all_correct"] == (5, 8) and filters.not_all_correct().needs == {"group", "parts:success"}
    # By who was played: the one that was not does not make a group wrong.
    gone = b.traj._replace(length=b.traj.length.at[3].set(0).at[5].set(0), mask=b.traj.mask.at[3].set(False))
    less = b._replace(traj=gone, mask=b.mask.at[3].set(False).at[5].set(False))
    np.testing.assert_array_equal(kept(run(filters.not_all_correct(), less)[0]), GROUPS == 2)


WHOLE = ["varied", "complete", "uncertain", "uncertain_mass", "best_of_group", "correct", "not_all_correct"]


@pytest.mark.parametrize("name", WHOLE)
def test_a_restarted_episode_stays_or_goes_as_one(name):
    b = conversations(5)
    whole, halves = run(getattr(filters, name)(), b)[0], run(getattr(filters, name)(), split(b), segments=2)[0]
    np.testing.assert_array_equal(joined(halves.mask), whole.mask)


@pytest.mark.parametrize("filtration, chance", [("power", [1, 4, 0, 0]), ("max-random", [1, 4, 1, 1])])
def test_episodes_are_drawn_again_by_their_return(filtration, chance):
    values = {"power": [1, 2, 0, 0], "max-random": [0, 1, 0, 0]}[filtration]
    b = paid(conversations(6), np.tile(values, 2))
    part, counts = filters.policy_filtration(filtration=filtration), np.zeros(8)
    rows = np.asarray(b.logp_old)
    for key in range(40):
        out, _ = run(part, b, key=key)
        counts += [(np.asarray(out.logp_old) == row).all(1).sum() for row in rows]
    expected = np.tile(chance, 2) / (2 * np.sum(chance))
    np.testing.assert_allclose(counts / counts.sum(), expected, atol=0.06)
    if filtration == "power":
        assert counts[2] == 0
    assert part.needs == {"parts:exact_reward"}


def test_only_uncertain_tokens_learn_and_the_others_still_count():
    b = conversations(7)
    out, _ = run(filters.top_entropy(), b, entropy_fraction=0.2)
    gate, mask, entropy = np.asarray(out.extra["importance"]), np.asarray(b.mask), np.asarray(b.extra["entropy"])
    assert (np.asarray(out.mask) == mask).all()
    number = int(0.2 * mask.sum())
    assert set(np.flatnonzero((gate * mask).ravel())) == set(np.argsort(-np.where(mask, entropy, -1).ravel())[:number])
    wide, keep = with_gap(b)
    np.testing.assert_array_equal(
        np.asarray(run(filters.top_entropy(), wide)[0].extra["importance"])[:, keep] * mask, gate * mask
    )


def test_covariance_chooses_tokens():
    b = conversations(8)
    mask, logp, adv = np.asarray(b.mask), np.asarray(b.logp_old), np.asarray(b.adv)
    cov = np.where(mask, (logp - logp[mask].mean()) * (adv - adv[mask].mean()), -np.inf)
    held = np.asarray(run(filters.kl_cov(), b, cov_fraction=0.1)[0].extra["held"])
    assert set(np.flatnonzero(held.ravel())) == set(np.argsort(-cov.ravel())[: int(0.1 * mask.sum())])
    out, metrics = run(filters.clip_cov(), b, cov_fraction=0.1, cov_low=0.05, cov_high=5.0)
    gate = np.asarray(out.extra["importance"])
    silent = mask & (gate == 0)
    assert silent.sum() == metrics["silenced"][0] == int(0.1 * mask.sum()) and (cov[silent] > 0.05).all()


@pytest.mark.parametrize("name", filters.CORRECTIONS)
def test_a_correction_is_the_ratio_of_the_two_policies(name):
    b = conversations(9, expert=(1,))
    level, rule, low, high = filters.CORRECTIONS[name]
    weight = np.asarray(run(filters.behaviour_correction(correction=name), b)[0].extra["importance"])
    d = np.asarray(b.logp_old) - np.asarray(b.traj.logp)
    for i in range(8):
        on = np.asarray(b.mask)[i]
        if i == 1:
            assert (weight[i][on] == 1).all()
            continue
        w = {
            "token": d[i][on],
            "sequence": np.full(on.sum(), d[i][on].sum()),
            "geometric": np.full(on.sum(), d[i][on].mean()),
        }
        w = np.exp(w[level])
        w = np.clip(w, low, high) if rule == "truncate" else np.where((w >= low) & (w <= high), w, 0)
        np.testing.assert_allclose(weight[i][on], w, rtol=1e-5)
        assert not weight[i][~on].any()


@pytest.mark.parametrize("name", filters.CORRECTIONS)
def test_normalised_weights_have_a_mean_of_one(name):
    """Over tokens, or over the sequences that have one weight each; the expert's stay 1 and count for nobody."""
    b = conversations(9, expert=(1,))
    level, rule, low, _ = filters.CORRECTIONS[name]
    mask, own = np.asarray(b.mask), np.asarray(b.mask & ~b.traj.expert)

    def weights(low, high, **options):
        part = filters.behaviour_correction(correction=name, **options)
        return np.asarray(run(part, b, correction_low=low, correction_high=high)[0].extra["importance"], np.float64)

    # Bounds in the midst of these random ratios, so that every rule does something and none does it to all.
    free = weights(0.0, 1e9)[own]
    bounds = (np.quantile(free, 0.3) if low else 0.0, np.quantile(free, 0.7))
    raw, found = weights(*bounds), weights(*bounds, normalise_weights=True)
    changed = raw[own] != free
    assert changed.any() and not changed.all() and (rule == "truncate" or (raw[own] == 0).any())
    if level == "token":
        mean = raw[own].mean()
    else:
        mean = np.mean([raw[i, on][0] for i, on in enumerate(own) if on.any()])
    assert mean > 0
    expected = np.where(own, raw / mean, raw)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert (found[1][mask[1]] == 1).all() and not found[~mask].any()


def test_an_episode_with_an_impossible_token_is_vetoed():
    b = conversations(9, expert=(1,))
    written = [np.flatnonzero(row) for row in np.asarray(b.mask)]
    far = b.logp_old.at[0, written[0][1]].set(-12.0).at[1, written[1][0]].set(-12.0).at[3, written[3][0]].set(-5.0)
    b = b._replace(logp_old=far)
    raw = np.asarray(run(filters.behaviour_correction(), b)[0].extra["importance"])
    part = filters.behaviour_correction(veto=True)
    assert part.hyper["veto_floor"] == 1e-4 and "veto_floor" not in filters.behaviour_correction().hyper
    found = np.asarray(run(part, b)[0].extra["importance"])
    vetoed = np.arange(8) == 0
    np.testing.assert_array_equal(found, np.where(vetoed[:, None], 0, raw))
    found = np.asarray(run(part, b, veto_floor=0.05)[0].extra["importance"])
    np.testing.assert_array_equal((found == 0).all(1), np.isin(np.arange(8), (0, 3)))
    halves = run(part, split(b), segments=2)[0]
    np.testing.assert_array_equal((joined(halves.extra["importance"]) == 0).all(1), vetoed)
    # Weights are normalised before the veto, which then takes a share of them away.
    both = run(filters.behaviour_correction(veto=True, normalise_weights=True), b)[0].extra["importance"]
    alone = run(filters.behaviour_correction(normalise_weights=True), b)[0].extra["importance"]
    np.testing.assert_array_equal(both, np.where(vetoed[:, None], 0, alone))


def test_corrections_multiply_what_filters_left():
    b, _ = run(filters.top_entropy(), conversations(10))
    out, _ = run(filters.behaviour_correction(), b)
    alone, _ = run(filters.behaviour_correction(), b._replace(extra={}))
    np.testing.assert_allclose(out.extra["importance"], b.extra["importance"] * alone.extra["importance"], rtol=1e-6)


def test_observations_are_blanked_and_nothing_else():
    b, seen = conversations(11), []

    def score(view, of):
        seen.append(view.tokens(of))
        return Score(*(jnp.full(of.mask.shape, -0.5),) * 3, of.bootstrap)

    tools = tools_of(b, score=score)
    out, _ = run(filters.masked_observations(), b, tools=tools, perception_mask=1.0)
    tokens, start = seen[0]
    old, mask, codec = np.asarray(b.traj.tokens), np.asarray(b.traj.mask), tools.codec
    text = np.asarray(codec.sampleable)[old] & (old != codec.end_action)
    np.testing.assert_array_equal(tokens, np.where(text & ~mask, codec.pad, old))
    assert not np.asarray(start).any() and (np.asarray(out.extra["logp_masked"]) == -0.5).all()
    run(filters.masked_observations(), b, tools=tools, perception_mask=0.0)
    np.testing.assert_array_equal(seen[1][0], old)


def test_choices_are_refused_by_name():
    for make, message in [
        (lambda: filters.policy_filtration(filtration="best"), "Unknown filtration 'best'. Known: power"),
        (lambda: filters.behaviour_correction(correction="x"), "Unknown correction 'x'. Known: tis, mis"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
    assert jax.tree.leaves(filters.varied().hyper) == []
