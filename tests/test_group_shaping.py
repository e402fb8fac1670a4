import itertools

import numpy as np
import oracles
import pytest
from jitted import call

from agentrl_jax import group_shaping, key_tokens
from agentrl_jax.groups import group_relative
from agentrl_jax.masked import whiten

golden = oracles.golden
ONE = np.zeros(4, int)


def gigpo_example(omega=1.0, **options):
    anchor = np.array([[10, 11], [10, 11], [10, 12]])
    reward = np.array([[0, 1], [0, 0], [0, 1.0]])
    return call(group_shaping.gigpo, reward, anchor, np.ones((3, 2), bool), np.zeros(3, int), 1, omega=omega, **options)


def test_gigpo_worked_examples():
    np.testing.assert_allclose(gigpo_example(), golden("A14.A.mean"), atol=1e-5)
    np.testing.assert_allclose(gigpo_example(scale="std", episode_statistics="step"), golden("A14.A.std"), atol=1e-5)
    no_steps = gigpo_example(scale="std", omega=0.0)
    np.testing.assert_allclose(no_steps[:, 0], golden("A14.AE.stdtraj"), atol=1e-5)
    np.testing.assert_allclose(gigpo_example(omega=0.0)[:, 0], golden("A14.AE.mean"), atol=1e-5)
    step = gigpo_example(scale="std") - no_steps
    np.testing.assert_allclose(step, golden("A14.AS.std"), atol=1e-5)


@pytest.mark.parametrize("scale", ["none", "std"])
@pytest.mark.parametrize("seed", range(3))
def test_gigpo_equals_the_oracle(scale, seed):
    rng = np.random.default_rng(seed)
    reward, anchor = rng.normal(size=(6, 3)), rng.integers(0, 3, (6, 3))
    played, group = rng.random((6, 3)) < 0.8, rng.integers(0, 2, 6)
    dirty = np.where(played, reward, np.nan)
    got = call(group_shaping.gigpo, dirty, anchor, played, group, 2, discount=0.9, omega=0.7, scale=scale)
    np.testing.assert_allclose(got, oracles.gigpo(reward, anchor, played, group, 0.9, 0.7, scale), atol=1e-4)


def test_gigpo_of_equal_returns_and_lone_anchors_is_exactly_zero():
    rng = np.random.default_rng(0)
    anchor = rng.integers(0, 99, (4, 2))
    got = call(group_shaping.gigpo, np.full((4, 2), 0.1), anchor, np.ones((4, 2), bool), ONE, 1, discount=0.0)
    np.testing.assert_array_equal(got, np.zeros((4, 2)))
    apart = np.arange(8).reshape(4, 2)
    step = call(group_shaping.step_relative, rng.normal(size=(4, 2)), apart, np.ones((4, 2), bool), ONE)
    np.testing.assert_array_equal(step, np.zeros((4, 2)))


def test_p11_longer_episodes_do_not_weigh_more_in_gigpo():
    played = np.array([[1, 1, 1], [1, 0, 0]], bool)
    reward = np.array([[0, 0, 1.0], [0, 0, 0]])
    adv = call(group_shaping.gigpo, reward, np.arange(6).reshape(2, 3), played, np.zeros(2, int), 1)
    np.testing.assert_allclose(adv, np.where(played, [[0.5], [-0.5]], 0.0), atol=1e-6)


def test_dense_ids_name_equal_tuples_alike():
    a, b = np.array([3, 3, 1, 3, 1]), np.array([7, 8, 7, 7, 7])
    got = call(group_shaping.dense_ids, a, b, where=np.array([1, 1, 1, 1, 0], bool))
    assert got[0] == got[3] and got[4] == -1
    assert len({got[0], got[1], got[2]}) == 3
    assert set(got[:4]) <= set(range(5))


def test_turn_level_worked_examples():
    turn_reward = np.array([[1, 0], [1, 0], [0, 0], [0, 0.0]])
    outcome = np.array([1, 0, 0, 1.0])
    two = np.ones((4, 2), bool)
    adv = call(group_shaping.turn_relative, turn_reward, outcome, two, ONE, 1)
    np.testing.assert_allclose(adv[:, 0], golden("A15.first"), atol=1e-5)
    np.testing.assert_allclose(adv[:, 1], golden("A15.O"), atol=1e-5)
    np.testing.assert_allclose(adv[:, 0] - adv[:, 1], golden("A15.T"), atol=1e-5)
    one = np.array([[1, 0]] * 4, bool)
    single = call(group_shaping.turn_relative, turn_reward, outcome, one, ONE, 1)
    np.testing.assert_allclose(single[:, 0], golden("A15.comb"), atol=1e-5)
    assert not single[:, 1].any()


def test_process_supervision_sums_the_normalised_rewards_that_follow():
    reward, played = np.array([[1.0, 0.0], [3.0, np.nan]]), np.array([[1, 1], [1, 0]], bool)
    adv = call(group_shaping.process_relative, reward, played, np.zeros(2, int), 1, eps=0.0)
    z = (np.array([1, 0, 3.0]) - 4 / 3) / np.std([1, 0, 3.0], ddof=1)
    np.testing.assert_allclose(adv, [[z[0] + z[1], z[1]], [z[2], 0]], atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_process_supervision_equals_the_oracle(seed):
    rng = np.random.default_rng(seed)
    reward, played, group = rng.normal(size=(6, 3)), rng.random((6, 3)) < 0.8, rng.integers(0, 2, 6)
    got = call(group_shaping.process_relative, np.where(played, reward, np.nan), played, group, 2)
    np.testing.assert_allclose(got, oracles.process_relative(reward, played, group), atol=1e-4)


def test_a_joint_return_centred_turn_by_turn_worked_example():
    """MAGRPO's advantage: the returns to go of a group's members compared at the same turn."""
    turn, ret = np.tile(np.arange(2), (4, 1)), golden("D.magrpo.G")
    got = call(group_shaping.step_relative, ret, turn, np.ones((4, 2), bool), ONE)
    np.testing.assert_allclose(got, golden("D.magrpo.A"), atol=1e-6)


def test_tree_worked_examples():
    ret, sub = np.array([1.0, 0, 0, 0]), np.array([[0, 1], [0, 1], [0, 2], [0, 2]])
    sized = call(group_shaping.tree_relative, ret, sub, 3)
    np.testing.assert_allclose(sized, golden("A18.gs"), atol=1e-5)
    np.testing.assert_allclose(
        call(group_shaping.tree_relative, ret, sub, 3, weight="average"), golden("A18.av"), atol=1e-5
    )
    np.testing.assert_allclose(call(whiten, sized, np.ones(4, bool)), golden("A18.gs.whiten"), atol=1e-4)
    np.testing.assert_allclose(call(group_shaping.tree_relative, ret, sub[:, :1], 3), golden("A18.d0"), atol=1e-6)
    skipped = call(group_shaping.tree_relative, ret, sub, 3, skip_equal=True)
    np.testing.assert_allclose(skipped[2:], golden("A18.d0")[2:], atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weight", ["group_size", "average"])
def test_tree_equals_the_oracle(seed, weight):
    rng = np.random.default_rng(seed)
    ret = rng.normal(size=8)
    sub = np.stack([np.zeros(8, int), rng.integers(1, 4, 8), rng.integers(-1, 9, 8)], axis=1)
    got = call(group_shaping.tree_relative, ret, sub, 9, weight=weight)
    np.testing.assert_allclose(got, oracles.tree_relative(ret, sub, weight == "group_size"), atol=1e-5)


def test_tokens_of_a_shared_prefix_have_one_owner_and_one_advantage():
    parent, branch = np.array([-1, 0, 1, -1]), np.array([-1, 2, 3, -1])
    owner = call(group_shaping.token_owner, parent, branch, 4)
    np.testing.assert_array_equal(owner, [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 2], [3, 3, 3, 3]])
    mask = np.ones((4, 4), bool)
    mask[1, 0] = False
    adv = call(group_shaping.shared_prefix_mean, np.array([3.0, 0, 6, 1]), owner, mask)
    np.testing.assert_allclose(adv, [[4.5, 3, 3, 3], [0, 3, 3, 0], [4.5, 3, 3, 6], [1, 1, 1, 1]], atol=1e-6)


def test_entropy_worked_examples():
    base = call(group_relative, np.array([1, 0, 0, 1.0]), ONE, 1, eps=1e-4)
    got = call(group_shaping.entropy_scaled, base, np.array([0.5, 1, 2, 0.5]), ONE, 1)
    np.testing.assert_allclose(got, golden("A21"), atol=1e-5)
    vanishing = call(group_shaping.entropy_scaled, base, np.array([0.0, 1, 2, 0.5]), ONE, 1)
    assert vanishing[0] == pytest.approx(10 * base[0])
    h = np.array([0.2, 1, 3])
    np.testing.assert_allclose(call(group_shaping.entropy_shaped, np.ones(3), h), golden("A23.ent.pos"), atol=1e-6)
    np.testing.assert_allclose(
        call(group_shaping.entropy_shaped, np.full(3, -0.8), h), golden("A23.ent.neg"), atol=1e-6
    )
    np.testing.assert_array_equal(call(group_shaping.entropy_shaped, np.zeros(3), h), np.zeros(3))


def test_aspo_worked_examples():
    arrays = (np.full(2, 0.9), np.array([100.0, 300]), np.array([500.0, 700]), np.zeros(2, int), 1)
    both = np.ones(2, bool)
    np.testing.assert_allclose(call(group_shaping.aspo_shaping, *arrays, where=both), golden("A32.A"), atol=1e-5)
    gentle = call(group_shaping.aspo_shaping, *arrays, where=both, delta=-1.5)
    np.testing.assert_allclose(gentle - 0.9, golden("A32.bias1p5"), atol=1e-5)
    lone = call(group_shaping.aspo_shaping, *arrays, where=np.array([True, False]))
    np.testing.assert_allclose(lone, [0.9, 0.9])
    bounded = call(group_shaping.aspo_shaping, *arrays, where=both, delta=-100.0)
    np.testing.assert_allclose(bounded, [0.9 * 1.7, 0.9 * 0.3], atol=1e-6)


def test_ktae_worked_example_and_oracle():
    pairs = itertools.product(range(5), repeat=2)
    tables = np.array([(a, b, r - a, w - b) for r, w in pairs for a in range(r + 1) for b in range(w + 1)])
    got = call(key_tokens.ktae_key, *tables.T.astype(float), max_group=8)
    np.testing.assert_allclose(got, [oracles.ktae_key(*map(int, t)) for t in tables], atol=2e-4)
    example = int(np.nonzero((tables == (3, 1, 1, 3)).all(1))[0][0])
    assert got[example] == pytest.approx(golden("A33.ktae")[4], abs=1e-5)
    p = call(key_tokens.fisher_p, *tables.T.astype(float), max_group=8)
    assert p[example] == pytest.approx(golden("A33.ktae")[0], abs=1e-5)


def test_ktae_counts_responses_of_the_own_group():
    tokens = np.array([[5, 5, 6], [5, 7, 6], [6, 7, 7], [7, 6, 6], [5, 5, 5], [6, 6, 6]])
    mask, group = np.ones((6, 3), bool), np.array([0, 0, 0, 0, 1, 1])
    mask[2, 2] = False
    got = call(
        key_tokens.ktae, tokens, mask, np.array([1, 1, 0, 0, 1, 1]), group, 2, vocab_size=9, max_group=4,
        special=tokens == 7,
    )  # fmt: skip
    five, six = oracles.ktae_key(2, 0, 0, 2), oracles.ktae_key(2, 2, 0, 0)
    np.testing.assert_allclose(got[0], [five, five, six], atol=1e-5)
    np.testing.assert_allclose(got[1], [five, 0, six], atol=1e-5)
    np.testing.assert_array_equal(got[4:], np.zeros((2, 3)))
