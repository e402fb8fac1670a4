import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jitted import call

from agentrl_jax import groups, selection
from agentrl_jax.masked import whiten

golden = oracles.golden
RET = np.array([1, 0, 0, 1, 0.5, 0.5, 0.5, 0.5, 2.0])
GID = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2])
LEN = np.array([2, 3, 1, 4, 2, 2, 2, 2, 3])
ZERO_SUM = [
    (groups.group_relative, {}),
    (groups.group_relative, {"scale": "none"}),
    (groups.group_relative, {"scale": "batch"}),
    (groups.group_relative, {"scale": "batch-centred"}),
    (groups.leave_one_out, {}),
    (groups.gpg, {}),
    (groups.pass_at_k_advantage, {"k": 2}),
]
OTHERS = [(groups.best_gap, {}), (groups.max_at_k_advantage, {"k": 2}), (groups.length_weighted, {"length": LEN})]


def run(fn, ret, group, num=3, **options):
    """Padded to one shape by members of no group, so that all cases of a function share a compilation."""
    assert num <= 5
    size = len(ret)

    def pad(x, fill):
        return jnp.concatenate([jnp.asarray(x), jnp.full(9 - size, fill, jnp.asarray(x).dtype)])

    arrays = [pad(ret if isinstance(ret, jax.Array) else np.asarray(ret, np.float32), 1), pad(group, -1)]
    if fn is groups.length_weighted:
        arrays.insert(1, pad(options.pop("length")[:size], 1))
    masks = {name: pad(options.pop(name), True) for name in ("where", "statistics") if name in options}
    return call(fn, *arrays, 5, **options, **masks)[:size]


def ids(options):
    return getattr(options, "__name__", None) or ",".join(f"{v}" for v in options.values())


def lone(name, zero=8):
    """The worked example with the lone member at 0, which is what every function here gives it."""
    want = golden(name).copy()
    want[zero] = 0.0
    return want


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "A12.verl"),
        ({"eps": 1e-4}, "A12.trl"),
        ({"ddof": 0}, "A12.ddof0"),
        ({"eps": 1e-4, "scale": "batch"}, "A12.batchstd"),
        ({"scale": "none"}, "A13.drgrpo"),
        ({"eps": 1e-4, "scale": "batch-centred"}, "A3.seqstd"),
    ],
)
def test_group_relative_worked_examples(options, name):
    np.testing.assert_allclose(run(groups.group_relative, RET, GID, **options), lone(name), atol=1e-5)


def test_other_worked_examples():
    np.testing.assert_allclose(run(groups.leave_one_out, RET, GID), golden("A4.rloo.single0"), atol=1e-5)
    np.testing.assert_allclose(run(groups.length_weighted, RET, GID, length=LEN), golden("A.opo"), atol=1e-5)
    np.testing.assert_allclose(run(groups.gpg, RET, GID), golden("A.gpg.paper"), atol=1e-5)
    one = np.zeros(4, int)
    for ddof in (0, 1):
        got = run(groups.group_relative, [1.0, 0, 0, 0], one, 1, ddof=ddof)
        np.testing.assert_allclose(got, golden(f"A12.1of4.ddof{ddof}"), atol=1e-5)
    posterior = run(groups.group_relative, golden("A24.R"), one, 1, eps=1e-4)
    np.testing.assert_allclose(posterior, golden("A24.A"), atol=1e-4)


def test_reinforce_plus_plus_baseline_worked_example():
    centred = run(groups.group_relative, RET, GID, scale="none")
    adv = call(whiten, centred, np.ones(9, bool), count=LEN)
    np.testing.assert_allclose(adv, golden("A3.single0"), atol=1e-5)


def test_gdpo_worked_example():
    rewards = np.array([[1, 0, 1, 0], [0.2, 0.4, 0.9, 0.5]]).T
    one = np.zeros(4, int)
    np.testing.assert_allclose(call(groups.gdpo, rewards, np.ones(2), one, 1), golden("A33.gdpo"), atol=1e-5)
    plain = run(groups.group_relative, rewards.sum(1), one, 1, eps=1e-4)
    np.testing.assert_allclose(plain, golden("A33.grposum"), atol=1e-5)


@pytest.mark.parametrize(("right", "k", "name"), [(2, 4, "8.2.4"), (2, 1, "8.2.1"), (4, 4, "8.4.4")])
def test_pass_at_k_training_worked_examples(right, k, name):
    correct = np.r_[np.ones(right), np.zeros(8 - right)]
    adv = run(groups.pass_at_k_advantage, correct, np.zeros(8, int), 1, k=k)
    mean, _, positive, negative = golden(f"A19.{name}")
    np.testing.assert_allclose(adv, np.where(correct, positive, negative), atol=1e-5)
    assert float(call(selection.pass_at_k, np.array([8]), np.array([right]), k=k)[0]) == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("right", [0, 6, 8])
def test_pass_at_k_training_without_signal_is_exactly_zero(right):
    adv = run(groups.pass_at_k_advantage, np.r_[np.ones(right), np.zeros(8 - right)], np.zeros(8, int), 1, k=4)
    np.testing.assert_array_equal(adv, np.zeros(8))


def test_p08_deviation_convention_is_explicit():
    one, options = np.zeros(4, int), {"eps": 0.0}
    r = np.array([1.0, 0, 0, 0])
    high = run(groups.group_relative, r, one, 1, ddof=0, **options)
    np.testing.assert_allclose(high, [3**0.5] + [-(3**-0.5)] * 3, atol=1e-5)
    low = run(groups.group_relative, r, one, 1, ddof=1, **options)
    np.testing.assert_allclose(low, [1.5, -0.5, -0.5, -0.5], atol=1e-5)
    np.testing.assert_allclose(run(groups.leave_one_out, r, one, 1), [1, -1 / 3, -1 / 3, -1 / 3], atol=1e-6)
    centred = run(groups.group_relative, r, one, 1, scale="none")
    np.testing.assert_allclose(centred, [0.75, -0.25, -0.25, -0.25], atol=1e-6)
    eight, zeros = np.r_[np.ones(3), np.zeros(5)], np.zeros(8, int)
    for fn, opts, high, low in (
        (groups.group_relative, {"ddof": 1, "eps": 0.0}, 1.2076, -0.7246),
        (groups.group_relative, {"ddof": 0, "eps": 0.0}, 1.2910, -0.7746),
        (groups.leave_one_out, {}, 0.7143, -0.4286),
    ):
        np.testing.assert_allclose(run(fn, eight, zeros, 1, **opts), np.where(eight, high, low), atol=1e-4)


def test_p10_groups_go_by_identity():
    np.testing.assert_array_equal(run(groups.group_relative, [1.0, 0, 1, 0], [0, 1, 0, 1], 2), np.zeros(4))
    ragged = run(groups.group_relative, [0.0, 3, 3, 10, 20], [0, 0, 0, 1, 1], 2, scale="none")
    np.testing.assert_allclose(ragged, [-2, 1, 1, -5, 5], atol=1e-6)
    np.testing.assert_array_equal(run(groups.leave_one_out, [0.0, 0, 1, 1], [0, 0, 1, 1], 2), np.zeros(4))


def test_p11_an_episode_counts_once_however_it_is_split():
    """Statistics are taken over episodes; rows read their episode's number."""
    episode_of_row = np.array([0, 0, 0, 1])
    adv = run(groups.group_relative, [1.0, 0.0], [0, 0], 1, scale="none")
    np.testing.assert_allclose(adv[episode_of_row], [0.5, 0.5, 0.5, -0.5])


@pytest.mark.parametrize(("fn", "options"), ZERO_SUM + OTHERS, ids=ids)
@pytest.mark.parametrize("value", [0.1, 0.7, 1e6 + 0.1])
def test_equal_returns_and_lone_members_give_exactly_zero(fn, options, value):
    ret = np.array([value] * 3 + [0.7, 0.7, 1.0, 0.1])
    adv = run(fn, ret, np.array([0, 0, 0, 1, 1, 2, 3]), 5, **options)
    np.testing.assert_array_equal(adv, np.zeros(7))


@pytest.mark.parametrize("dtype", [np.int32, "bfloat16", bool])
def test_equal_returns_of_any_type_give_exactly_zero_without_epsilon(dtype):
    ret = jnp.asarray([0.1, 0.1, 0.1, 0.7, 0.7, 1.0, 0.1], dtype)
    for scale in ("std", "batch"):
        adv = run(groups.group_relative, ret, np.array([0, 0, 0, 1, 1, 2, 3]), 5, scale=scale, eps=0.0)
        np.testing.assert_array_equal(adv, np.zeros(7))


@pytest.mark.parametrize(("fn", "options"), ZERO_SUM, ids=ids)
def test_advantages_of_a_group_add_to_zero(fn, options):
    rng = np.random.default_rng(0)
    ret = (rng.random(9) < 0.5).astype(float)
    adv = run(fn, ret, GID, **options)
    np.testing.assert_allclose([adv[GID == g].sum() for g in range(3)], 0.0, atol=1e-5)


@pytest.mark.parametrize(("fn", "options"), ZERO_SUM + OTHERS, ids=ids)
def test_members_that_do_not_count_change_nothing(fn, options):
    rng = np.random.default_rng(1)
    ret, keep = (rng.random(9) < 0.5).astype(float), np.array([1, 1, 0, 1, 1, 1, 0, 1, 1], bool)
    dirty = np.where(keep, ret, np.nan)
    adv = run(fn, dirty, GID, where=keep, **options)
    assert not adv[~keep].any()
    outside = run(fn, dirty, np.where(keep, GID, [7, 7, 7, 7, 7, -1, -1, 7, 7]), **options)
    np.testing.assert_allclose(outside, adv, atol=1e-6)
    short = {k: v[keep] if k == "length" else v for k, v in options.items()}
    np.testing.assert_allclose(adv[keep], run(fn, ret[keep], GID[keep], **short), atol=1e-6)


ORACLES = [
    (groups.group_relative, {"scale": "std", "ddof": 0}, lambda r, g: oracles.group_relative(r, g, "std", 0)),
    (groups.group_relative, {"scale": "std"}, lambda r, g: oracles.group_relative(r, g)),
    (groups.group_relative, {"scale": "none"}, lambda r, g: oracles.group_relative(r, g, "none")),
    (groups.group_relative, {"scale": "batch"}, lambda r, g: oracles.group_relative(r, g, "batch")),
    (groups.group_relative, {"scale": "batch-centred"}, lambda r, g: oracles.group_relative(r, g, "batch-centred")),
    (groups.leave_one_out, {}, oracles.leave_one_out),
    (groups.length_weighted, {"length": LEN}, lambda r, g: oracles.length_weighted(r, LEN, g)),
    (groups.gpg, {}, oracles.gpg),
    (groups.max_at_k_advantage, {"k": 1}, lambda r, g: oracles.max_at_k_advantage(r, g, 1)),
    (groups.max_at_k_advantage, {"k": 2}, lambda r, g: oracles.max_at_k_advantage(r, g, 2)),
    (groups.max_at_k_advantage, {"k": 3}, lambda r, g: oracles.max_at_k_advantage(r, g, 3)),
    (groups.max_at_k_advantage, {"k": 3, "baseline": False}, lambda r, g: oracles.max_at_k_advantage(r, g, 3, False)),
    (groups.pass_at_k_advantage, {"k": 3}, lambda r, g: oracles.pass_at_k_advantage(r > 0.5, g, 3)),
    (groups.best_gap, {}, oracles.best_gap),
]


@pytest.mark.parametrize(("fn", "options", "oracle"), ORACLES)
@pytest.mark.parametrize("seed", range(3))
def test_group_functions_equal_the_oracles(fn, options, oracle, seed):
    rng = np.random.default_rng(seed)
    ret, group = np.round(rng.normal(size=9), 1), rng.integers(0, 3, 9)
    if fn is groups.pass_at_k_advantage:
        ret = (ret > 0).astype(float)
    np.testing.assert_allclose(run(fn, ret, group, **options), oracle(ret, group), atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_gdpo_equals_the_oracle(seed):
    rng = np.random.default_rng(seed)
    rewards, weights = np.round(rng.normal(size=(9, 3)), 1), np.array([1.0, -0.5, 2.0])
    group, where = rng.integers(0, 3, 9), rng.random(9) < 0.8
    dirty = np.where(where[:, None], rewards, np.nan)
    got = call(groups.gdpo, dirty, weights, group, 3, where=where)
    np.testing.assert_allclose(got, oracles.gdpo(rewards, weights, group, where), atol=1e-4)


@settings(deadline=None, max_examples=25)
@given(st.permutations(range(9)))
def test_permuting_the_batch_permutes_the_advantages(order):
    order = list(order)
    for fn, options in ZERO_SUM[:1] + ZERO_SUM[4:5] + OTHERS[:2]:
        adv = run(fn, RET, GID, **options)
        np.testing.assert_allclose(run(fn, RET[order], GID[order], **options), adv[order], atol=1e-6)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from([0.1, 0.2, 0.3, 1e-3, 7.7, 123.456]), min_size=9, max_size=9))
def test_groups_do_not_touch_each_other(values):
    """Group 1 has equal returns of any value and stays at 0; group 0 does not see group 2."""
    ret = np.array(values, np.float32)
    ret[4:8] = ret[4]
    adv = run(groups.group_relative, ret, GID)
    assert not adv[4:].any()
    ret[8] = 1e6
    np.testing.assert_array_equal(run(groups.group_relative, ret, GID)[:8], adv[:8])


def test_identities_between_estimators():
    rng = np.random.default_rng(3)
    ret, one = rng.normal(size=6), np.zeros(6, int)
    centred = run(groups.group_relative, ret, one, 1, scale="none")
    np.testing.assert_allclose(run(groups.leave_one_out, ret, one, 1), 6 / 5 * centred, atol=1e-6)
    std = run(groups.group_relative, ret, one, 1, eps=0.0)
    np.testing.assert_allclose(run(groups.group_relative, 3 * ret + 5, one, 1, eps=0.0), std, atol=1e-5)
    binary = (ret > 0).astype(float)
    np.testing.assert_allclose(
        run(groups.pass_at_k_advantage, binary, one, 1, k=1),
        run(groups.group_relative, binary, one, 1, ddof=0, eps=0.0),
        atol=1e-5,
    )
    equal_lengths = run(groups.length_weighted, ret, one, 1, length=np.full(6, 3))
    np.testing.assert_allclose(equal_lengths, centred, atol=1e-6)


def test_statistics_of_some_measure_the_others():
    ret, one = np.array([0.0, 1.0, 0.0, 5.0]), np.zeros(4, int)
    own = np.array([1, 1, 1, 0], bool)
    adv = run(groups.group_relative, ret, one, 1, statistics=own, ddof=0, eps=0.0)
    sigma = math.sqrt(2 / 9)
    np.testing.assert_allclose(adv, (ret - 1 / 3) / sigma, rtol=1e-5)
    np.testing.assert_array_equal(run(groups.group_relative, ret, one, 1, statistics=np.zeros(4, bool)), np.zeros(4))


def test_best_gap_pays_the_best_alone():
    sigma = np.std([3.0, 1, 2], ddof=1)
    got = run(groups.best_gap, [3.0, 1, 2, 4, 4, 0], [0, 0, 0, 1, 1, 1], 2, eps=0.0)
    np.testing.assert_allclose(got, [1 / sigma, 0, 0, 0, 0, 0], atol=1e-6)


def test_dynamic_sampling_keeps_groups_that_differ():
    np.testing.assert_array_equal(run(groups.varied, RET, GID), GID == 0)


def test_unknown_names_and_bad_k_are_refused():
    with pytest.raises(ValueError, match=r"Unknown scale 'sd'. Known: std, none"):
        groups.group_relative(RET, GID, 3, scale="sd")
    with pytest.raises(ValueError, match="k must be above 0"):
        groups.pass_at_k_advantage(RET, GID, 3, k=0)
