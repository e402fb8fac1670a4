"""Who is compared with whom, and preference algorithms on what they make of it."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conversations import T, conversations, run, split, tools_of

from agentrl_jax import algorithms, objectives, pairs, preference, trees
from agentrl_jax.algorithms import make, prefer, unpaired
from agentrl_jax.algorithms.preferences import PAIRS, RULES
from agentrl_jax.types import Score

GROUPS = np.asarray((0, 0, 0, 1, 1, 1, 2, 2))


def written(b):
    return np.asarray(b.mask).sum(1)


def with_success(b, right):
    return b._replace(
        traj=b.traj._replace(
            steps=b.traj.steps | {"success": jnp.zeros((8, 4)).at[:, 0].set(jnp.asarray(right, jnp.float32))}
        )
    )


def test_brevity_is_preferred_among_right_answers():
    b = with_success(conversations(2), [1, 1, 1, 1, 1, 0, 1, 1])
    out, metrics = run(pairs.shortest_against_longest(), b)
    length = written(b)
    for group in range(3):
        rows = np.flatnonzero(GROUPS == group)
        short, long = rows[length[rows].argmin()], rows[length[rows].argmax()]
        if group == 1 or length[short] == length[long]:
            assert not np.asarray(out.mask[group]).any()
            continue
        np.testing.assert_array_equal(out.traj.tokens[group, :, 0], np.asarray(b.traj.tokens)[[short, long]])
    assert metrics["pairs_kept"][1] == 3
    loose, _ = run(pairs.shortest_against_longest(all_correct=False), b)
    assert np.asarray(loose.mask[1]).any() == (length[3] != length[4])


def paired(seed):
    b = conversations(seed)
    out, _ = run(pairs.best_against_worst(), b)
    return out


def test_beta_follows_the_gap():
    b = paired(3)
    part = pairs.dynamic_beta()
    memory = {"mean": jnp.float32(0.2), "std": jnp.float32(1.0)}
    numbers = {k: jnp.float32(v) for k, v in part.hyper.items()}
    new, out, _ = part.stage(memory, b, tools_of(conversations(3)), numbers, jax.random.key(0))
    mask = np.asarray(b.mask)
    kept = mask.any((1, 2, 3))
    total = (np.where(mask, np.asarray(b.logp_old) - np.asarray(b.extra["logp_ref"]), 0)).sum((2, 3))
    gap = (total[:, 0] - total[:, 1])[kept]
    np.testing.assert_allclose(out.extra["beta"][0], max(0.1 * (1 + 0.6 * (gap.mean() - 0.2)), 1e-3), rtol=1e-5)
    np.testing.assert_allclose(new["mean"], 0.9 * 0.2 + 0.1 * gap.mean(), rtol=1e-5)
    assert np.asarray(out.mask).any((1, 2, 3)).sum() == np.ceil(0.8 * kept.sum() - 1e-6)


def test_mismatched_rows_put_words_behind_another_prompt():
    b = conversations(4, groups=(0, 0, 0, 1, 1, 1, 2, 2, 2))
    tools = tools_of(b)._replace(group_size=3)
    tokens, offset, inside = (np.asarray(x) for x in pairs.mismatched_rows(b, tools))
    mask, old = np.asarray(b.traj.mask), np.asarray(b.traj.tokens)
    for i in range(9):
        j = (i + 3) % 9
        assert GROUPS[min(i, 7)] != GROUPS[min(j, 7)] or i >= 6
        start, other = mask[i].argmax(), mask[j].argmax()
        assert offset[i] == other - start
        np.testing.assert_array_equal(tokens[i, :other], old[j, :other])
        for t in np.flatnonzero(np.asarray(b.mask)[i]):
            assert inside[i, t] == (t + offset[i] < T)
            if inside[i, t]:
                assert tokens[i, t + offset[i]] == old[i, t]


def test_labels_and_their_reference_point():
    b = conversations(5, groups=(0, 0, 0, 1, 1, 1))

    def score(view, of):
        value = {"policy": -0.5, "reference": -0.75}[view.model]
        return Score(*(jnp.full(of.mask.shape, value),) * 3, of.bootstrap)

    tools = tools_of(b, score=score)._replace(group_size=3)
    out, metrics = run(pairs.desirable(), b, tools=tools)
    np.testing.assert_array_equal(out.extra["desirable"], np.asarray(b.traj.reward).sum(1) > 0.5)
    inside = np.asarray(pairs.mismatched_rows(b, tools)[2])
    np.testing.assert_allclose(out.extra["kto_reference"], 0.25 * inside.sum(1).mean(), rtol=1e-5)
    assert metrics["desirable"][1] == 6


@pytest.mark.parametrize("name", RULES)
def test_a_preference_loss_is_its_function_of_the_pairs(name):
    """Sums or means over the agent's words, by rows in NumPy and the pure function of the rule."""
    b = paired(6)
    b = b._replace(extra=b.extra | {"beta": jnp.full(3, 0.3)})
    rule = RULES[name]
    hyper = {k: jnp.float32(v) for k, v in rule.hyper.items()}
    logp = jnp.minimum(b.logp_old - 0.2, -1e-2)
    b = objectives.weigh_pairs(b, {}, 1)
    score = Score(logp, jnp.zeros_like(logp), jnp.zeros_like(logp), b.bootstrap)
    found, metrics = objectives.preference_objective(rule.loss, rule.reward)({"policy": score}, b, hyper)
    mask = np.asarray(b.mask)
    kept = mask.any((1, 2, 3))
    p, r = (np.where(mask, np.asarray(x, np.float64), 0).sum((2, 3)) for x in (logp, b.extra["logp_ref"]))
    n = np.maximum(mask.sum((2, 3)), 1)
    (w, l), (rw, rl) = p.T, r.T  # noqa: E741
    (mw, ml), (rmw, rml) = (p / n).T, (r / n).T
    mw, ml = (np.where(kept, x, -0.5) for x in (mw, ml))  # Odds of nothing written have no logarithm.
    sigma = lambda z: -np.vectorize(oracles.log_sigmoid)(z)  # noqa: E731
    odds = lambda: np.vectorize(oracles.log_odds)(mw) - np.vectorize(oracles.log_odds)(ml)  # noqa: E731
    h, mean_h = (w - rw) - (l - rl), (mw - rmw) - (ml - rml)
    expected = {
        "dpo": lambda: sigma(0.1 * h), "dpo-nll": lambda: sigma(0.1 * h) - mw,
        "robust": lambda: (0.9 * sigma(0.1 * h) - 0.1 * sigma(-0.1 * h)) / 0.8,
        "hinge": lambda: np.maximum(0, 1 - 0.1 * h),
        "ipo": lambda: (mean_h - 5) ** 2, "ipo-sum": lambda: (h - 5) ** 2, "dynamic": lambda: sigma(0.3 * h),
        "simpo": lambda: sigma(2 * (mw - ml) - 0.5), "cpo": lambda: sigma(0.1 * (w - l)) - mw,
        "orpo": lambda: -mw + 0.1 * sigma(odds()), "lcpo": lambda: sigma(odds()),
        "dmpo": lambda: dmpo(b, logp),
        "bradley_terry": lambda: sigma(np.asarray(b.bootstrap)[:, 0, 0] - np.asarray(b.bootstrap)[:, 1, 0]),
    }[name]()  # fmt: skip
    np.testing.assert_allclose(found, expected[kept].mean(), rtol=2e-4)
    assert metrics["margin"][1] == kept.sum() > 0


def test_label_noise_is_an_option():
    b = objectives.weigh_pairs(paired(6), {}, 1)
    loss, score = RULES["robust"].loss, Score(b.logp_old - 0.2, b.value, b.value, b.bootstrap)
    found = lambda e: objectives.preference_objective(loss)(  # noqa: E731
        {"policy": score}, b, {"beta": jnp.float32(0.5), "label_noise": jnp.float32(e)}
    )[0]
    mask = np.asarray(b.mask)
    gap = np.where(mask, np.asarray(score.logp - b.extra["logp_ref"], np.float64), 0).sum((2, 3))
    z = 0.5 * (gap[:, 0] - gap[:, 1])[mask.any((1, 2, 3))]
    right, flipped = np.log1p(np.exp(-z)), np.log1p(np.exp(z))
    for e in (0.0, 0.2, 0.4):
        np.testing.assert_allclose(found(e), ((1 - e) * right - e * flipped).mean() / (1 - 2 * e), rtol=1e-4)
    assert prefer(loss="robust", label_noise=0.3).hyper == {"beta": 0.1, "label_noise": 0.3}
    for noise in (0.5, -0.1, np.asarray([0.1, 0.6])):
        with pytest.raises(ValueError, match=r"label_noise must be in \[0, 0.5\)"):
            prefer(loss="robust", label_noise=noise)
    with pytest.raises(ValueError, match=r"custom has no option \['label_noise'\]; it has: .*label_smoothing"):
        prefer(loss="dpo", label_noise=0.1)


def test_a_reward_model_reads_the_last_row_that_was_played():
    b = split(conversations(6))
    out, _ = run(pairs.best_against_worst(), b, segments=2)
    length = np.asarray(out.traj.length)
    last = np.where(length[..., 1] > 0, 1, 0)
    assert 0 < last.sum() < last.size
    value = np.random.default_rng(0).normal(size=length.shape).astype(np.float32)
    zero = jnp.zeros_like(out.logp_old)
    found = objectives.final_value(Score(zero, zero, zero, jnp.asarray(value)), out)
    np.testing.assert_array_equal(found, np.take_along_axis(value, last[..., None], -1)[..., 0])


def branched(seed, turn):
    """Episodes whose first of a group is a root, from which the others branch off at the beginning of ``turn``."""
    b = conversations(seed)
    begun = np.asarray(b.traj.mask) & (np.asarray(b.traj.turn) == turn)
    first = np.where(begun.any(1), begun.argmax(1), -1)
    root = np.isin(np.arange(8), (0, 3, 6))
    return b._replace(traj=b.traj._replace(branch=jnp.asarray(np.where(root, -1, first), jnp.int32)))


@pytest.mark.parametrize("limit", [1, 2, None])
def test_segments_begin_where_a_pair_parts_and_are_equally_long(limit):
    checked = 0
    for seed in range(8):
        b = branched(seed, 1)
        part = trees.segment_pairs(segment_turns=limit)
        out, _ = run(part, b)
        whole, _ = run(pairs.best_against_worst(), b)
        step, _ = run(trees.step_pairs(), b)
        for p in range(3):
            mask, turn = np.asarray(whole.mask)[p, :, 0], np.asarray(whole.traj.turn)[p, :, 0]
            turns = [len(set(turn[i][mask[i]])) for i in range(2)]
            if not mask.any() or min(turns) < 2 or np.asarray(out.traj.branch)[p].max() < 0:
                continue
            last = min(turns) - 1 if limit is None else min(min(turns) - 1, limit)
            expected = mask & (turn >= 1) & (turn <= last)
            np.testing.assert_array_equal(np.asarray(out.mask)[p, :, 0], expected)
            assert len(set(turn[0][expected[0]])) == len(set(turn[1][expected[1]])) == last
            if limit == 1:
                np.testing.assert_array_equal(np.asarray(step.mask)[p], np.asarray(out.mask)[p])
            checked += 1
    assert checked >= 5


def dmpo(b, logp):
    out = []
    for i in range(3):
        ratio = []
        for side in range(2):
            mask, turn = np.asarray(b.mask)[i, side, 0], np.asarray(b.traj.turn)[i, side, 0]
            d = np.asarray(logp - b.extra["logp_ref"], np.float64)[i, side, 0]
            ratio.append([d[mask & (turn == k)].sum() for k in range(turn[mask].max(initial=-1) + 1)] or [0.0])
        out.append(oracles.dmpo(np.asarray(ratio[0]), np.asarray(ratio[1]), 0.1, 0.7))
    return np.asarray(out, float)


def test_kto_weighs_every_episode_alike():
    b = conversations(7)
    good = np.asarray([1, 0, 1, 0, 0, 1, 0, 0], bool)
    b = b._replace(extra=b.extra | {"desirable": jnp.asarray(good), "kto_reference": jnp.full(8, 0.1)})
    b = objectives.weigh_rows(b._replace(mask=b.mask.at[3].set(False)), {}, 1)
    logp = b.logp_old - 0.1
    hyper = {k: jnp.float32(v) for k, v in {"beta": 0.1, "weight_desirable": 1.0, "weight_undesirable": 1.33}.items()}
    score = Score(logp, logp, logp, b.bootstrap)
    found, _ = objectives.unpaired_objective({"policy": score}, b, hyper)
    u = np.where(b.mask, logp - b.extra["logp_ref"], 0).sum(1)
    expected = preference.kto(u, jnp.zeros(8), jnp.asarray(good), 0.1, beta=0.1, weight_undesirable=1.33)
    np.testing.assert_allclose(found, np.delete(np.asarray(expected), 3).mean(), rtol=1e-5)


def test_a_method_for_given_pairs_says_that_its_pairs_are_its_own():
    built = {name for name in algorithms.names() if algorithms.preset(name).build in (prefer, unpaired)}
    assert built >= {"simpo", "orpo", "cpo", "kto", "dmpo"}
    for name in built - {"online_dpo", "iterative_rpo"}:
        said = algorithms.preset(name).deviates
        assert said.startswith("Trained online, on ") and ", not offline on " in said, name


def test_preferences_are_composed_by_name():
    assert algorithms.make("online_dpo", loss="ipo-sum", beta=0.3).hyper == {"beta": 0.3}
    assert "reference" not in prefer(loss="simpo").needs and prefer(loss="dpo").needs >= {"reference", "pairs"}
    for name in PAIRS:
        assert prefer(pairs=name).hyper["beta"] == 0.1
    assert prefer(pairs="segment_pairs").needs == make("sdpo").needs == {"pairs", "reference", "one_segment"}
    for build, message in [
        (lambda: prefer(loss="x"), "Unknown loss 'x'. Known: dpo"),
        (lambda: prefer(pairs="x"), "Unknown pairs 'x'. Known: best_against_worst"),
        (lambda: prefer(gamma=1.0), r"custom has no option \['gamma'\]; it has: .*beta"),
        (lambda: make("simpo", gamma="x"), "gamma must be a number, got 'x'"),
        (lambda: unpaired(gamma=1.0), r"custom has no option \['gamma'\]"),
        (lambda: prefer(loss="dmpo", pairs="segment_pairs"), "segment_pairs compares a part that begins late"),
        (lambda: prefer(loss="bradley_terry", beta=0.1), r"custom has no option \['beta'\]; it has: label_margin"),
        (lambda: prefer(pairs="segment_pairs", segment_turns=0), "segment_turns must be at least 1, got 0"),
        (lambda: make("sdpo", segment_turns="all"), "sdpo: segment_turns must be of type int, got 'all'"),
        (lambda: make("lcpo", all_correct="no"), "lcpo: all_correct must be of type bool, got 'no'"),
    ]:
        with pytest.raises(ValueError, match=message):
            build()
