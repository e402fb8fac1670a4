import math

import jax
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jitted import call

from agentrl_jax import selection
from agentrl_jax.groups import group_relative, group_std, members

golden = oracles.golden
RET = np.array([1, 0, 1, 0, 1, 1, 1, 1, 0.2, 0.4, 0.3, 0.1, 0, 0, 0, 1])
GID = np.repeat(np.arange(4), 4)


def test_soft_overlong_worked_example():
    length = np.array([16384, 16385, 18432, 20480, 20481])
    got = call(selection.soft_overlong, length, max_length=np.float32(20480), buffer=np.float32(4096))
    np.testing.assert_allclose(got, golden("B4.soft"), atol=1e-7)


def test_uncertain_groups_worked_example():
    std = call(lambda r, g: group_std(r, members(g, 4), 4), RET, GID)
    np.testing.assert_allclose(std[::4], golden("A16.std"), atol=1e-5)
    np.testing.assert_array_equal(call(selection.uncertain_groups, RET, GID, 4), GID == 0)
    np.testing.assert_array_equal(call(selection.uncertain_groups, RET, GID, 4, fraction=0.5), np.isin(GID, (0, 3)))
    np.testing.assert_array_equal(call(selection.uncertain_groups, RET, GID, 4, fraction=1.0), GID != 1)
    assert not call(selection.uncertain_groups, np.full(16, 0.1), GID, 4).any()
    np.testing.assert_array_equal(call(selection.uncertain_mass, RET, GID, 4, mass=0.85), np.isin(GID, (0, 3)))
    np.testing.assert_array_equal(call(selection.uncertain_mass, RET, GID, 4, mass=1.0), GID != 1)
    assert not call(selection.uncertain_mass, np.full(16, 0.1), GID, 4).any()


def test_history_resampling_drops_only_what_is_solved():
    np.testing.assert_array_equal(call(selection.not_all_correct, RET, GID, 4), GID != 1)


def test_policy_filtration_worked_example():
    score = np.array([-1, 0.5, 2])
    np.testing.assert_allclose(call(selection.filtration_probability, score), golden("A22.pow2"), atol=1e-6)
    ends = call(selection.filtration_probability, score, method="max-min")
    np.testing.assert_allclose(ends, [0.5, 0, 0.5], atol=1e-6)
    best = call(selection.filtration_probability, score, method="max-random")
    np.testing.assert_allclose(best, np.array([1, 1, 4]) / 6, atol=1e-6)
    np.testing.assert_allclose(call(selection.filtration_probability, np.zeros(3)), np.full(3, 1 / 3), atol=1e-6)
    kept = call(selection.filtration_probability, np.array([3.0, np.nan, 4.0]), where=np.array([1, 0, 1], bool))
    np.testing.assert_allclose(kept, [9 / 25, 0, 16 / 25], atol=1e-6)
    with pytest.raises(ValueError, match="Unknown method 'best'"):
        selection.filtration_probability(score, method="best")


def test_replay_worked_example():
    adv, where = np.array([1.5, -0.5, 0.25, 0.75]), np.ones(4, bool)
    np.testing.assert_allclose(call(selection.replay_probability, adv, where), golden("A28"), atol=1e-6)
    np.testing.assert_array_equal(call(selection.replay_probability, np.zeros(4), where), np.zeros(4))


def test_greso_worked_example():
    streak = np.array([0, 1, 3, 10])
    np.testing.assert_allclose(call(selection.skip_probability, streak, np.float32(0.5)), golden("A27.skip"), atol=1e-6)
    after = call(selection.update_streak, streak, np.array([1, 0, 1, 1], bool), np.array([1, 1, 1, 0], bool))
    np.testing.assert_array_equal(after, [1, 0, 4, 10])
    base = call(
        selection.update_skip_base, np.array([0.5, 0.5, 0.05, 0.95]), np.array([0.3, 0.1, 0.9, 0.0]), target=0.2
    )
    np.testing.assert_allclose(base, [0.49, 0.51, 0.05, 0.95], atol=1e-6)


def test_dars_worked_example():
    one = np.array([0.125])
    assert call(selection.extra_rolls, one, 8, max_rolls=32)[0] == golden("A20.ET")
    assert call(selection.extra_rolls, one, 8, max_rolls=64, hardness_weighted=True)[0] == golden("A20.HW")
    assert call(selection.extra_rolls, one, 8, max_rolls=16)[0] == 8


@pytest.mark.parametrize(
    ("share", "rolls", "name"), [((0.125,), 8, "A20.S"), ((0.25, 0.5, 0.75), 4, "A20.curve")], ids=["one", "curve"]
)
def test_what_dars_evens_out_worked_example(share, rolls, name):
    """``S(a) = 2 a (1 - a)``, or ``2 sqrt(a (1 - a))`` under a deviation: a group's mean ``|A|``; and the extra rolls
    lift ``(rolls + extra) S`` to the peak, the sum of a group half of which is right."""
    a = np.array(share)
    ret = (np.arange(rolls) < rolls * a[:, None]).astype(float)
    group = np.repeat(np.arange(len(a)), rolls)

    def spread(**options):
        adv = call(group_relative, ret.ravel(), group, len(a), **options)
        return np.abs(adv).reshape(ret.shape).mean(1)

    plain = spread(scale="none")
    np.testing.assert_allclose(plain, np.atleast_1d(golden(name)), atol=1e-6)
    np.testing.assert_allclose(spread(ddof=0, eps=0.0), 2 * np.sqrt(a * (1 - a)), atol=1e-6)
    total = (rolls + call(selection.extra_rolls, a, rolls, max_rolls=64)) * plain
    hard = a < 0.5
    assert (total[hard] >= rolls / 2 - 1e-5).all() and (total[hard] < rolls / 2 + plain[hard]).all()
    np.testing.assert_allclose(total[~hard], rolls * plain[~hard])


@pytest.mark.parametrize("std", [False, True])
@pytest.mark.parametrize("hard", [False, True])
def test_dars_equals_the_formula(std, hard):
    share = np.arange(9) / 8
    want = []
    for a in share:
        a = 0.5 / 8 if a <= 1e-6 else a
        if a >= 0.5:
            want.append(0)
            continue
        s = 2 * math.sqrt(a * (1 - a)) if std else 2 * a * (1 - a)
        peak = 8 if std else 4
        goal = 2 * (1 - a) * peak if hard else peak
        want.append(min(max(math.ceil((goal - 8 * s) / s - 1e-9), 0), 56))
    got = call(selection.extra_rolls, share, 8, max_rolls=64, hardness_weighted=hard, std_normalised=std)
    np.testing.assert_array_equal(got, want)


def test_hints_grow_until_solved():
    got = call(selection.hint_fraction, np.array([1, 0, 0, 0], bool), np.array([0.25, 0, 0.5, 0.75]))
    np.testing.assert_allclose(got, [0.25, 0.25, 0.75, 0.75])


def test_branching_worked_example():
    got = call(selection.branch_score, np.full(2, 0.5), np.array([-0.3, 0.3]))
    np.testing.assert_allclose(got, golden("A23.arpo"), atol=1e-6)


def test_untidiness_of_an_episode():
    calls, errors, answers, turns = np.array([[0, 0, 1, 2], [4, 1, 1, 2], [4, 4, 0, 2], [2, 0, 9, 2]]).T
    got = call(selection.call_penalty, calls, errors, answers, turns)
    np.testing.assert_allclose(got, [0.5, 0.25, 2.0, 1.0], atol=1e-6)


def test_resample_on_correct_keeps_the_cleanest_in_proportion():
    ret = np.array([1, 1, 1, 1, 0, 0, 0, 0, 1, 0.0])
    penalty = np.array([0.3, 0.1, 0.2, 0.9, 0.5, 0.1, 0.7, 0.9, 0.0, 0.0])
    group = np.array([0] * 8 + [1] * 2)
    got = call(selection.resample_on_correct, ret, penalty, group, 2, keep=4)
    np.testing.assert_array_equal(got, [0, 1, 1, 0, 1, 1, 0, 0, 1, 1])
    none = call(selection.resample_on_correct, np.zeros(10), penalty, group, 2, keep=4)
    assert none[:8].sum() == 4 and none[8:].all()


@settings(deadline=None, max_examples=25)
@given(st.lists(st.booleans(), min_size=8, max_size=8), st.integers(0, 99))
def test_resample_on_correct_always_keeps_the_number_asked_for(right, seed):
    ret = np.array(right, float)
    penalty = np.random.default_rng(seed).random(8)
    options = {"keep": 4, "min_failed": 1, "min_correct": 1}
    got = call(selection.resample_on_correct, ret, penalty, np.zeros(8, int), 1, jax.random.key(seed), **options)
    assert got.sum() == 4
    for kind in (ret > 0, ret == 0):
        assert (got & kind).sum() >= min(1, kind.sum())
        assert abs((got & kind).sum() - kind.sum() / 2) <= 1


def test_resample_on_correct_prefers_small_penalties():
    ret, penalty = np.ones(8), np.r_[np.zeros(4), np.ones(4)]

    def kept(keys):
        one = np.zeros(8, int)
        return jax.vmap(lambda k: selection.resample_on_correct(ret, penalty, one, 1, k, keep=4))(keys).sum(0)

    assert call(kept, jax.random.split(jax.random.key(0), 50))[:4].sum() > 0.9 * 200


@pytest.mark.parametrize(
    ("n", "c", "k", "want"),
    [
        *((4, 1, 4, 1.0), (4, 1, 2, 0.5), (4, 1, 1, 0.25), (10, 3, 1, 0.3), (10, 3, 5, 0.91666667), (5, 5, 1, 1.0)),
        *((200, 5, 100, 0.97030839), (6, 0, 5, 0.0)),
    ],
)
def test_p55_pass_at_k_is_unbiased(n, c, k, want):
    assert float(call(selection.pass_at_k, np.array([n]), np.array([c]), k=k)[0]) == pytest.approx(want, abs=1e-5)


def test_p55_more_than_the_samples_is_refused():
    assert np.isnan(call(selection.pass_at_k, np.array([2]), np.array([0]), k=5)[0])
    with pytest.raises(ValueError, match="total must be at least 5, got 2"):
        selection.pass_at_k(2, 0, k=5)
    with pytest.raises(ValueError, match="samples must be at least 3, got 2"):
        selection.max_at_k(np.zeros(2), k=3)


def test_best_of_k_worked_example():
    value = np.array([0.1, 0.5, 0.2, 0.9])
    assert float(call(selection.max_at_k, value, k=2)) == pytest.approx(float(golden("A19.pkpo.val")), abs=1e-6)
    weights = [float(call(selection.max_at_k, np.eye(4)[-1 - i : 4].sum(0), k=2)) for i in range(4)]
    np.testing.assert_allclose(np.diff([0.0, *weights])[::-1], golden("A19.pkpo.w"), atol=1e-6)
    binary = np.array([1, 0, 0, 1.0, 0])
    plain = call(selection.pass_at_k, np.array([5]), np.array([2]), k=3)[0]
    assert float(call(selection.max_at_k, binary, k=3)) == pytest.approx(float(plain), abs=1e-6)


def test_best_of_group_takes_the_first_of_ties():
    ret, group = np.array([1.0, 3, 3, 2, 2, 9]), np.array([0, 0, 0, 1, 1, 2])
    where = np.array([1, 1, 1, 1, 1, 0], bool)
    np.testing.assert_array_equal(call(selection.best_of_group, ret, group, 4, where=where), [0, 1, 0, 1, 0, 0])
    np.testing.assert_allclose(call(selection.accuracy_of_group, ret > 2, group, 4, where=where), [2 / 3, 0, 0, 0])
