"""Collectors: what is rolled again, what is kept, and that nothing is lost or counted twice on the way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import tools, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from lent import collector, lend, numbers, same, shape, spied, together_as_alone, toy, well_formed
from tiny import biased

from agentrl_jax import collect, envs, scoring, selection
from agentrl_jax import episodes as picking
from agentrl_jax.algorithm import Shape
from agentrl_jax.parts import noted
from agentrl_jax.train import TrainConfig

KEY = jax.random.key(0)
STRONG = 40.0
ALWAYS_0, ALWAYS_1, EITHER = biased(b"0", STRONG), biased(b"1", STRONG), biased(b"01", STRONG)


ONE = TrainConfig(12, 3, slots=8, max_tokens=10)
MANY = TrainConfig(12, 3, slots=12, max_tokens=10, segments=3)
LONG = TrainConfig(8, 2, slots=8, max_tokens=40)
WIDE = TrainConfig(24, 4, max_tokens=12)
SETUPS = {
    "refill": (collect.refill(3), envs.make("probe_restart"), MANY),
    "hints": (collect.hints(3), envs.make("probe_delayed"), LONG),
}


@functools.cache
def compiled(name):
    return jax.jit(collector(*SETUPS[name]))


def run(name, params, key=KEY, memory=None, **changed):
    part, env, config = SETUPS[name]
    memory = part.init(KEY, shape(env, config)) if memory is None else memory
    memory, traj = compiled(name)(memory, params, key, numbers(part, **changed))
    return memory, jax.tree.map(np.asarray, traj)


def returns(traj, config):
    return traj.reward.reshape(config.episodes, -1).sum(1)


def in_groups(x, config):
    return x.reshape(-1, config.group_size)


def first_bit(traj):
    """The digit that a row of ``probe_observation`` was shown."""
    return traj.tokens[:, 2] & 1


# ReMax


def test_the_greedy_return_is_that_of_one_more_episode_of_the_groups_task():
    config, part = ONE, collect.greedy_baseline()

    def play(params):
        lent, spy = spied(lend(envs.make("probe_observation"), config, params, part))
        return part.collect((), lent, {}, KEY)[1], *spy

    # Greedy writes 1; a sample often does not.
    traj, rolled, greedy = jax.tree.map(np.asarray, jax.jit(play)(biased(b"1", 6.0, end=3.0)))
    well_formed(traj, config)
    same(traj._replace(steps=None), rolled._replace(steps=None), 0)
    assert greedy.length.shape == (4,) and not greedy.temperature.any()
    np.testing.assert_array_equal(np.repeat(greedy.task, 3), traj.task)
    shown = first_bit(traj)
    assert set(shown) == {0, 1} and len(set(returns(traj, config)[shown == 1])) == 2
    np.testing.assert_array_equal(noted(traj, "greedy_return"), shown)
    assert noted(traj, "extra_tokens").sum() == pytest.approx(greedy.length.sum())


def test_advantages_against_the_greedy_return_are_those_of_the_card():
    mask = np.asarray([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    traj = trajectory(mask, reward=[[0, 0, 1, 0], [0] * 4, [0] * 4])
    traj = collect.note(traj, greedy_return=jnp.full(3, 0.4))
    stage = collect.subtract_baseline().stage
    _, out, _ = stage((), scoring.as_batch(traj), tools(traj), {}, KEY)
    np.testing.assert_allclose(out.adv, mask * np.asarray([[0.6], [-0.4], [0]]), atol=1e-6)
    with pytest.raises(ValueError, match="greedy_baseline"):
        stage((), scoring.as_batch(trajectory(mask)), tools(traj), {}, KEY)


# Dynamic sampling


def replaced(old, new):
    """The slow rule, on lists of groups of returns: which group stands in each place, ``("old" | "new", index)``."""
    spare = [i for i, g in enumerate(new) if max(g) > min(g)]
    out = []
    for i, group in enumerate(old):
        stays = max(group) > min(group) or not spare
        out.append(("old", i) if stays else ("new", spare.pop(0)))
    return out


@functools.cache
def replace_groups(count, size):
    def play(old, new, go, first):
        return collect._replace_groups(old, new, go, first, tools(old, groups=count, group_size=size))

    return jax.jit(play)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 1), min_size=16, max_size=16), st.booleans())
def test_groups_that_do_not_vary_make_way_in_order(ret, first):
    ret = np.asarray(ret, float).reshape(2, 4, 2)
    made = [
        trajectory(np.ones((8, 2)), reward=np.stack([np.zeros(8), r.ravel()], 1), seed=i) for i, r in enumerate(ret)
    ]
    got = replace_groups(4, 2)(*made, True, first)
    want = replaced(*ret.tolist()) if not first else [("new", i) for i in range(4)]
    index = {"old": 0, "new": 1}
    tokens = [np.asarray(made[index[which]].tokens).reshape(4, 2, 2)[i] for which, i in want]
    np.testing.assert_array_equal(np.asarray(got.tokens).reshape(4, 2, 2), tokens)
    same(replace_groups(4, 2)(*made, False, first), made[0], 0)


def test_refill_ends_with_groups_that_vary_and_counts_what_it_threw_away():
    config = SETUPS["refill"][2]
    seen = set()
    for seed in range(6):
        _, traj = run("refill", EITHER, jax.random.key(seed))
        well_formed(traj, config)
        ret = in_groups(returns(traj, config), config)
        rounds = noted(traj, "rounds", 3)
        assert len(set(rounds)) == 1 and 1 <= rounds[0] <= 3
        whole = np.all(ret.max(1) > ret.min(1))
        assert whole or rounds[0] == 3
        # Every episode of this policy has the same number of tokens: a round costs what a batch has.
        spent = traj.length.sum()
        assert noted(traj, "extra_tokens", 3).sum() == pytest.approx((rounds[0] - 1) * spent)
        assert np.all(traj.length > 0)
        seen.add((int(rounds[0]), bool(whole)))
    assert len(seen) > 1 and {True} <= {w for _, w in seen}


def test_without_a_group_that_varies_the_first_roll_stays():
    _, _, config = SETUPS["refill"]
    _, traj = run("refill", ALWAYS_0)
    ret = in_groups(returns(traj, config), config)
    assert np.all(ret.max(1) == ret.min(1)) and noted(traj, "rounds", 3)[0] == 3
    # Every roll has as many tokens as the one kept.
    assert noted(traj, "extra_tokens", 3).sum() == pytest.approx(2 * traj.length.sum())
    assert compiled("refill")._cache_size() == 1


# DARS


def dealt(accuracy, more, free):
    """The slow rule: free episodes go one by one to the hardest group that still wants some."""
    order, wants, out = sorted(range(len(accuracy)), key=lambda g: accuracy[g]), list(more), []
    for _ in range(free):
        group = next((g for g in order if wants[g] > 0), None)
        out.append(group)
        if group is not None:
            wants[group] -= 1
    return out


@functools.cache
def deal():
    return jax.jit(collect._deal)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=4, max_size=4), st.integers(0, 255))
def test_what_is_left_is_dealt_to_the_hardest(groups, free):
    accuracy, more = np.asarray(groups).T
    free = (free >> np.arange(8)) & 1 == 1
    own = np.arange(8) // 2
    played, group = deal()(accuracy / 4, more, free, own)
    want = dealt(accuracy.tolist(), more.tolist(), free.sum())
    np.testing.assert_array_equal(played[free], [g is not None for g in want])
    assert not np.any(np.asarray(played) & ~free)
    whole = [o if g is None else g for g, o in zip(want, own[free], strict=True)]
    np.testing.assert_array_equal(group[free], whole)


@functools.cache
def difficulty():
    tools = toy(WIDE)
    return jax.jit(lambda key: collect.difficulty_rolls(0.5).collect((), tools, {}, key)[1])


def test_hard_groups_get_the_episodes_that_easy_ones_do_not_need():
    sizes_seen = set()
    for seed in range(6):
        traj = jax.tree.map(np.asarray, difficulty()(jax.random.key(seed)))
        well_formed(traj, WIDE, groups=traj.group)
        assert np.all(np.diff(traj.group) >= 0) and set(traj.group) == set(range(6))
        early = [np.flatnonzero(traj.group == g)[:2] for g in range(6)]
        accuracy = np.asarray([traj.reward[i].sum() / 2 for i in early])
        more = selection.extra_rolls(jnp.asarray(accuracy), 2, max_rolls=24)
        want = dealt(accuracy.tolist(), np.asarray(more).tolist(), 12)
        played = [np.sum(traj.length[traj.group == g] > 0) for g in range(6)]
        assert played == [2 + want.count(g) for g in range(6)]
        assert np.sum(traj.length == 0) == want.count(None)
        for g in range(6):  # Those not played come last.
            assert np.all(np.diff((traj.length[traj.group == g] == 0).astype(int)) >= 0)
        sizes_seen.add(tuple(played))
    assert len(sizes_seen) > 3


def test_where_all_is_easy_half_of_the_batch_is_not_played():
    """The second half of every group stays, unplayed, where it was."""
    tools = toy(WIDE, pays=lambda task: task >= 0)
    traj = jax.jit(lambda key: collect.difficulty_rolls(0.5).collect((), tools, {}, key)[1])(KEY)
    well_formed(traj, WIDE)
    np.testing.assert_array_equal(np.asarray(traj.length > 0).reshape(6, 4), [[1, 1, 0, 0]] * 6)


# GRPO-RoC


def oversampled(part):
    """What was kept, and what was rolled."""

    def play(key):
        lent, spy = spied(toy(WIDE))
        return part.collect((), lent, {}, key)[1], *spy

    return jax.jit(play)


def test_the_tidiest_correct_episodes_of_a_larger_group_stay():
    """In proportion: of groups of eight, by the penalty 1/2 without a call, else the share that did not parse."""

    play = oversampled(collect.resample_correct(2, draw=False))
    for seed in range(3):
        traj, many = jax.tree.map(np.asarray, play(jax.random.key(seed)))
        well_formed(traj, WIDE)
        assert many.length.shape == (48,)
        for g in range(6):
            of = np.flatnonzero(many.group == g)
            right = many.reward[of].sum(1)
            calls, errors = (many.steps[x][of].sum(1) for x in ("tool_calls", "malformed"))
            tried = calls + errors  # The environment counts as calls those that parse.
            order = np.argsort(np.where(tried > 0, errors / np.maximum(tried, 1), 0.5), kind="stable")
            number = round(right.sum() * 4 / 8)
            keep = [i for i in order if right[i]][:number] + [i for i in order if not right[i]][: 4 - number]
            np.testing.assert_array_equal(traj.tokens[traj.group == g], many.tokens[of[np.sort(keep)]])
        assert noted(traj, "extra_tokens").sum() == pytest.approx(many.length.sum() - traj.length.sum())


def test_what_is_drawn_keeps_the_size_of_the_group_and_the_numbers_asked_for():
    play = oversampled(collect.resample_correct(2, min_failed=2, min_correct=2))
    for seed in range(4):
        traj, many = jax.tree.map(np.asarray, play(jax.random.key(seed)))
        well_formed(traj, WIDE)
        right = many.reward.sum(1).reshape(6, 8).sum(1)
        want = np.clip(np.round(right / 2), np.minimum(2, right), 4 - np.minimum(2, 8 - right))
        np.testing.assert_array_equal(in_groups(returns(traj, WIDE), WIDE).sum(1), want)
        rows = {tuple(x) for x in many.tokens.tolist()}
        assert len({tuple(x) for x in traj.tokens.tolist()} & rows) == 24


# Hints and experts


def test_a_hint_is_the_first_turn_of_three_and_only_for_groups_that_failed():
    """``probe_delayed`` is decided by the first of its turns: a quarter of the expert's three, rounded up, is it."""
    _, _, config = SETUPS["hints"]
    memory, traj = run("hints", ALWAYS_0)
    well_formed(traj, config)
    assert memory == 1 and noted(traj, "rounds")[0] == 2 and np.all(noted(traj, "hint") == 0.25)
    assert np.all(returns(traj, config) == 1)
    np.testing.assert_array_equal(traj.expert, traj.mask & (traj.turn == 0))
    assert np.all(np.any(traj.mask & ~traj.expert, axis=1))
    assert noted(traj, "extra_tokens").sum() == pytest.approx(traj.length.sum(), rel=0.1)

    _, traj = run("hints", ALWAYS_1)
    assert not traj.expert.any() and noted(traj, "rounds")[0] == 1 and not noted(traj, "extra_tokens").any()

    mixed = 0
    for seed in range(3):
        _, traj = run("hints", EITHER, jax.random.key(seed))
        well_formed(traj, config)
        hinted = in_groups(traj.expert.any(1), config)
        assert np.all(hinted.all(1) == hinted.any(1)) and np.all(returns(traj, config)[hinted.ravel()] == 1)
        assert np.all(in_groups(returns(traj, config), config).any(1))
        np.testing.assert_array_equal(noted(traj, "hint") > 0, hinted.ravel())
        mixed += hinted.any() and not hinted.all()
    assert mixed


def test_hints_begin_with_their_step():
    memory = jnp.int32(4)
    after, traj = run("hints", ALWAYS_0, memory=memory, hint_from=5.0)
    assert after == 5 and not traj.expert.any() and noted(traj, "rounds")[0] == 1
    _, traj = run("hints", ALWAYS_0, memory=after, hint_from=5.0)
    assert traj.expert.any() and compiled("hints")._cache_size() == 1


@pytest.mark.parametrize("rounds, fraction", [(1, 0.25), (2, 0.5), (4, 0.75)])
def test_hints_grow_and_never_give_everything_away(rounds, fraction):
    """Nobody ever solves a task here, which takes the expert one to four turns; some may solve those of one turn."""
    config, part = LONG._replace(episodes=32), collect.hints(rounds)
    tools = toy(config, pays=lambda task: task < 0)
    run = jax.jit(lambda key: part.collect(jnp.int32(0), tools, numbers(part), key)[1])
    traj = jax.tree.map(np.asarray, run(KEY))
    well_formed(traj, config)
    turns = 1 + traj.task % 4
    assert set(turns) == {1, 2, 3, 4}
    np.testing.assert_array_equal(noted(traj, "taught"), np.minimum(np.ceil(fraction * turns), turns - 1))
    np.testing.assert_allclose(noted(traj, "hint"), np.where(turns > 1, fraction, 0))
    assert noted(traj, "rounds")[0] == rounds + 1


def test_the_last_of_a_group_are_the_experts():
    traj = jax.jit(lambda key: collect.mixed_expert(3).collect((), toy(WIDE), {}, key)[1])(KEY)
    well_formed(traj, WIDE)
    np.testing.assert_array_equal(in_groups(noted(traj, "taught"), WIDE), [[0, 4, 4, 4]] * 6)
    np.testing.assert_array_equal(in_groups(traj.expert.any(1), WIDE), [[0, 1, 1, 1]] * 6)


# What holds for all of them


@pytest.mark.parametrize(
    "part, config", [(collect.refill(), MANY), (collect.difficulty_rolls(), WIDE), (collect.hints(), LONG)]
)
def test_seeds_together_equal_seeds_alone(part, config):
    """On made-up rollouts, so that the members are many and differ in their rounds, tasks and losses."""
    trajs = together_as_alone(part, config._replace(max_tokens=8))
    assert trajs.tokens.shape == (4, config.episodes * config.segments, 8)
    groups = trajs.group.reshape(4, -1)
    assert np.all(np.diff(groups) >= 0) and np.all(groups[:, -1] == config.episodes // config.group_size - 1)
    if "rounds" in trajs.steps:
        assert len(set(trajs.steps["rounds"][:, 0, 0].tolist())) > 1
        assert np.all(trajs.steps["extra_tokens"] >= 0) and trajs.steps["extra_tokens"].any()


def test_a_loop_of_rounds_has_one_rollout():
    """Rounds cost one compilation: beside the loops of a rollout there is only the loop around them."""
    part, env, config = SETUPS["refill"]
    plain = jax.make_jaxpr(lambda p: lend(env, config, p, part).roll(KEY))(ALWAYS_0)
    whole = jax.make_jaxpr(collector(part, env, config))((), ALWAYS_0, KEY, {})
    loops = lambda jaxpr: str(jaxpr).count("while[")  # noqa: E731
    assert loops(whole) == loops(plain) + 1 > 2


def test_a_return_that_is_no_number_makes_no_group_a_varied_one():
    traj = trajectory(np.ones((6, 1)), reward=[[0], [1], [np.nan], [1], [2], [2]])
    np.testing.assert_array_equal(picking.varied(traj, tools(traj, groups=3, group_size=2)), [True, False, False])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: collect.refill(0), "rounds must be at least 1, got 0"),
        (lambda: collect.hints(0), "rounds must be at least 1, got 0"),
        (lambda: collect.difficulty_rolls(1.0), r"first must be a share of the group in \(0, 1\), got 1.0"),
        (lambda: collect.difficulty_rolls(0.5, max_rolls=0), "max_rolls must be at least 1, got 0"),
        (lambda: collect.difficulty_rolls(0.9).init(KEY, Shape(4, 2, 8, 1)), "leaves nothing of a group of 2"),
        (lambda: collect.resample_correct(1), "oversample must be at least 2, got 1"),
        (lambda: collect.resample_correct(min_failed=3).init(KEY, Shape(4, 2, 8, 1)), "group_size must be at least 3"),
        (lambda: collect.mixed_expert(0), "experts must be above 0, got 0"),
        (lambda: collect.mixed_expert(2).init(KEY, Shape(4, 2, 8, 1)), "leave the policy an episode of every 2"),
    ],
)
def test_sizes_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
