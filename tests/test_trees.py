"""Values by continuation, trees of episodes, pairs of steps: against known values and slow versions of the rules."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch as made_up_batch
from batches import tools as made_up_tools
from batches import trajectory
from tiny import CODEC, POLICY, biased

from agentrl_jax import branching, envs, parts, sampling, scoring, train, trees
from agentrl_jax.algorithm import Algorithm, Tools
from agentrl_jax.rollout import assign_tasks, rollout
from agentrl_jax.types import Score, Start
from agentrl_jax.update import UpdateConfig

KEY = jax.random.key(0)
SIZES = {"delayed": (8, 2, 40, 384), "guess": (8, 4, 64, 6)}
"""Episodes, group size, tokens, and the most episodes that a collector asks for at once."""


@functools.cache
def env_of(name):
    return envs.make("probe_delayed") if name == "delayed" else envs.make("guess", max_turns=4)


def words(name):
    return biased(b"01", 3.0, 4.0) if name == "delayed" else biased(b"0123456789", 6.0, 7.0)


def playing(name):
    env, (_, _, width, most) = env_of(name), SIZES[name]
    return lambda p, key, temperature, start: rollout(
        POLICY, CODEC, env, p, key, episodes=most, slots=min(16, most), max_tokens=width, temperature=temperature,
        start=start, record=lambda s: s,
    )  # fmt: skip


@functools.cache
def program(name):
    return jax.jit(playing(name))


@functools.cache
def no_prefix(name):
    """Of no length, and so none."""
    most = SIZES[name][3]
    index = jnp.zeros(most, jnp.int32)
    begin = Start(index, index, index > 0)
    traj = jax.eval_shape(playing(name), words(name), KEY, 1.0, begin)
    prefix = jax.eval_shape(branching.branch, traj, index, index).prefix
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), prefix)


def tools_of(name, p, temperature=1.0) -> Tools:
    """What ``train`` lends to an algorithm, with the tiny policy.

    Compiling is all that it costs, so one program serves whatever is asked: the episodes that are too many are
    inactive, and one that begins at its reset has a prefix of no length.
    """
    env, (count, size, width, most) = env_of(name), SIZES[name]

    def roll(key, call=0, start=None, expert=False, episodes=count, group_size=size, record=False):
        assert not expert and episodes % group_size == 0
        key, ids = jax.random.fold_in(key, call), jnp.arange(episodes, dtype=jnp.int32)
        task, group = assign_tasks(key, Start() if start is None else start, ids, group_size)
        active = jnp.ones(episodes, bool) if start is None else start.active
        heat = jnp.full(episodes, temperature, jnp.float32) if start is None else start.temperature
        prefix = no_prefix(name)
        pad = lambda x: jnp.pad(x, [(0, most - episodes)] + [(0, 0)] * (x.ndim - 1))  # noqa: E731
        if start is not None:
            assert start.prefix.record is None  # nothing is carried that has no use
            prefix = jax.tree.map(pad, start.prefix._replace(record=()))._replace(record=prefix.record)
        whole = Start(pad(task), pad(group), pad(active), temperature=pad(heat), prefix=prefix)
        traj = program(name)(p, key, jnp.float32(1.0), whole)
        assert not np.any(traj.length[episodes:])
        return jax.tree.map(lambda x: x[:episodes], traj if record else traj._replace(record=None))

    def score(view, batch):
        return scoring.score(POLICY, p, view, batch, allowed=jnp.asarray(CODEC.sampleable))

    return Tools(roll, score, count, size, count // size, 1, True, width, env.spec.max_turns, CODEC)


def collect(part, name="guess", seed=0, temperature=1.0, p=None, **hyper):
    hyper = {k: jnp.float32(v) for k, v in (part.hyper | hyper).items()}
    p = words(name) if p is None else p
    memory, traj = part.collect((), tools_of(name, p, temperature), hyper, jax.random.key(seed))
    assert memory == ()
    return jax.tree.map(np.asarray, traj)


@functools.cache
def trees_of(seed):
    """Two groups of two roots and two leaves."""
    return collect(trees.tree(2), seed=seed)


def apply(part, traj, name="guess", hyper=None, b=None):
    b = scoring.as_batch(jax.tree.map(jnp.asarray, traj)) if b is None else b
    tools = tools_of(name, None)._replace(
        episodes=traj.length.shape[0], groups=max(int(traj.group.max()) + 1, 1), max_turns=traj.steps["played"].shape[1]
    )
    hyper = {k: jnp.float32(v) for k, v in (hyper or {"discount": 1.0}).items()}
    assert part.stage is not None
    memory, out, metrics = jax.jit(lambda b: part.stage((), b, tools, hyper, KEY))(b)
    assert memory == ()
    return jax.tree.map(np.asarray, out), {k: float(a) / max(float(n), 1.0) for k, (a, n) in metrics.items()}


# VinePPO


ROLLS = 16
VINE = trees.vine(ROLLS)


def chance_of_one(p):
    """That the first action is the bit 1: its first byte is odd, whatever follows."""
    prompt = [CODEC.start, CODEC.open_observation, *b"pick", CODEC.open_action]
    hidden = POLICY.forward(p, jnp.asarray([prompt])).hidden[:, -1]
    logp = sampling.log_probs(POLICY.logits(p, hidden), jnp.ones(1), jnp.asarray(CODEC.sampleable))[0]
    return float(jnp.sum(jnp.exp(logp)[1:256:2]))


def first_bit(traj, i):
    action = traj.tokens[i][traj.mask[i] & (traj.turn[i] == 0)]
    return float(action[0] < 256 and action[0] % 2)


def test_values_of_a_probe_are_its_chances():
    """Once the bit is chosen the value is the bit, exactly; before, it is the policy's chance of a one."""
    p = words("delayed")
    chance = chance_of_one(p)
    assert 0.2 < chance < 0.8
    traj = collect(VINE, "delayed")
    value = traj.record["mc_value"]
    assert value.shape == (8, 4) and not value[:, 3].any()
    bits = np.asarray([first_bit(traj, i) for i in range(8)])
    assert 0 < bits.sum() < 8
    np.testing.assert_array_equal(value[:, 1], bits)
    np.testing.assert_array_equal(value[:, 2], bits)
    np.testing.assert_array_equal(value[::2, 0], value[1::2, 0])  # mates share the estimate
    assert len(set(value[:, 0].tolist())) > 1  # groups do not, though here they share the prompt
    np.testing.assert_array_equal(value[:, 0] * ROLLS % 1, 0)
    several = np.concatenate([collect(VINE, "delayed", seed).record["mc_value"][::2, 0] for seed in range(4)])
    error = 4 * math.sqrt(chance * (1 - chance) / (16 * ROLLS))
    assert abs(several.mean() - chance) < error
    out, _ = apply(trees.vine_advantage(), traj, "delayed")
    for i in range(8):
        for k, expected in enumerate((bits[i] - value[i, 0], 0.0, 0.0)):
            found = out.adv[i][traj.mask[i] & (traj.turn[i] == k)]
            assert found.size
            np.testing.assert_allclose(found, expected, atol=1e-6)
    assert not out.adv[~traj.mask].any() and out.traj.record is None


def test_values_are_discounted_from_their_own_boundary():
    traj = collect(VINE, "delayed", discount=0.5)
    bits = np.asarray([first_bit(traj, i) for i in range(8)])
    value = traj.record["mc_value"]
    np.testing.assert_array_equal(value[:, 1], 0.5 * bits)
    np.testing.assert_array_equal(value[:, 2], bits)
    np.testing.assert_array_equal(4 * ROLLS * value[:, 0] % 1, 0)
    out, _ = apply(trees.vine_advantage(), traj, "delayed", {"discount": 0.5})
    for i in range(8):
        later = traj.mask[i] & (traj.turn[i] > 0)
        np.testing.assert_allclose(out.adv[i][later], 0.0, atol=1e-7)


def test_values_of_a_greedy_policy_are_its_returns_and_leave_no_advantage():
    traj = collect(VINE, "delayed", temperature=0.0)
    ret = traj.reward.sum(axis=1)
    np.testing.assert_array_equal(traj.record["mc_value"][:, :3], np.repeat(ret[:, None], 3, axis=1))
    out, _ = apply(trees.vine_advantage(), traj, "delayed")
    assert not out.adv.any()


def test_the_budget_counts_what_was_thrown_away():
    """Three tokens an action at most: a greedy policy that only ends its action writes one a turn."""
    traj = collect(VINE, "delayed", p=biased(b"", 0.0, 60.0))
    assert traj.mask.sum() == 8 * 3 and np.all(traj.reward == 0)
    # From the first boundary three actions for one of two mates, then two, then one.
    np.testing.assert_allclose(traj.steps["extra_tokens"][:, 0], ROLLS * (3 / 2 + 2 + 1))
    assert not traj.steps["extra_tokens"][:, 1:].any()
    metrics = train.rollout_metrics(jax.tree.map(jnp.asarray, traj))
    assert float(metrics["extra_tokens"][0] / metrics["extra_tokens"][1]) == ROLLS * 4.5
    traj = collect(VINE, "delayed")
    total, count = train.rollout_metrics(jax.tree.map(jnp.asarray, traj))["mc_value"]
    np.testing.assert_allclose(float(total / count), traj.record["mc_value"][:, 0].mean(), rtol=1e-6)


def test_vine_advantages_of_the_card():
    mask = np.asarray([[0, 1, 1, 0, 1, 0, 1, 1], [0, 1, 1, 1, 0, 0, 0, 0]], bool)
    reward = np.zeros(mask.shape)
    reward[0, 7], reward[1, 3] = 1.0, 0.25
    traj = trajectory(mask, reward=reward, turns=3)
    turn = np.asarray([[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, -1, -1, -1, -1]])
    value = np.asarray([[0.4, 0.6, 0.3, 0.0], [0.5, 9.0, 9.0, 0.0]], np.float32)
    traj = traj._replace(turn=jnp.asarray(turn), record={"mc_value": jnp.asarray(value)})
    out, _ = apply(trees.vine_advantage(), traj)
    np.testing.assert_allclose(out.adv[0], [0, 0.2, 0.2, 0, -0.3, 0, 0.7, 0.7], atol=1e-6)
    np.testing.assert_allclose(out.adv[1], [0, -0.25, -0.25, -0.25, 0, 0, 0, 0], atol=1e-6)
    with pytest.raises(ValueError, match="vine_advantage needs the values that the collector vine keeps"):
        apply(trees.vine_advantage(), traj._replace(record=None))


# Trees


ENTROPY = trees.tree(2, rule="entropy")


def check_tree(traj, roots, size=4):
    """Groups are equal, and every leaf shares with its root what lies below its branch."""
    n = traj.length.shape[0]
    np.testing.assert_array_equal(traj.group, np.arange(n) // size)
    np.testing.assert_array_equal(traj.episode, np.arange(n))
    assert len(set(traj.task.tolist())) == n // size and traj.record is None
    inherited = np.zeros(n)
    for i in range(n):
        base, place = i // size * size, i % size
        if place < roots:
            assert traj.parent[i] == traj.branch[i] == -1
            continue
        p, t = base + (place - roots) % roots, traj.branch[i]
        assert traj.parent[i] == p and traj.task[i] == traj.task[p]
        for name in ("tokens", "mask", "turn", "logp", "reward"):
            np.testing.assert_array_equal(getattr(traj, name)[i, :t], getattr(traj, name)[p, :t], err_msg=name)
        assert traj.mask[i, t] and traj.mask[p, t] and traj.tokens[i, t - 1] == CODEC.open_action
        inherited[i] = traj.mask[i, :t].sum()
    np.testing.assert_array_equal(traj.steps["inherited_tokens"][:, 0], inherited)


def branch_turns(traj):
    return np.asarray([traj.turn[i, t] if t >= 0 else -1 for i, t in enumerate(traj.branch)])


def test_leaves_branch_off_their_roots_after_a_result():
    turns = []
    for seed in range(6):
        traj = trees_of(seed)
        check_tree(traj, 2)
        turn = branch_turns(traj)
        last = np.where(traj.mask, traj.turn, -1).max(axis=1)
        leaf = traj.parent >= 0
        several = last[np.maximum(traj.parent, 0)] > 0
        assert np.all(turn[leaf & several] >= 1) and np.all(turn[leaf & ~several] == 0)
        assert np.all(turn[leaf] <= last[np.maximum(traj.parent, 0)][leaf])
        turns += turn[leaf].tolist()
    assert {1, 2, 3} <= set(turns)
    assert len({tuple(row[row >= 0]) for row in np.where(traj.mask, traj.tokens, -1)}) == 8  # all eight differ


def test_a_boundary_is_drawn_uniformly():
    which = np.asarray([[0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]], bool)
    draws = np.arange(0.5 / 600, 1, 1 / 600)
    pick = jax.jit(jax.vmap(trees._pick, (None, 0)))(which, jnp.asarray(np.repeat(draws[:, None], 4, 1), jnp.float32))
    count = [np.bincount(row, minlength=4).tolist() for row in np.asarray(pick).T]
    assert count == [[0, 200, 200, 200], [0, 300, 0, 300], [600, 0, 0, 0], [600, 0, 0, 0]]
    assert trees._pick(jnp.asarray(which), jnp.ones(4) - 2**-24).tolist() == [3, 3, 0, 0]


def test_entropy_decides_where_a_leaf_branches():
    """A turn qualifies when its draw, less ``alpha`` times the rise in entropy, is at most the threshold."""
    always = collect(ENTROPY, branch_threshold=1.0)
    never = collect(ENTROPY, branch_threshold=-1.0)
    check_tree(always, 2), check_tree(never, 2)
    leaf = always.parent >= 0
    several = np.where(always.mask, always.turn, -1).max(axis=1)[np.maximum(always.parent, 0)] > 0
    assert np.any(leaf & several)
    np.testing.assert_array_equal(branch_turns(always)[leaf], several[leaf].astype(int))
    assert np.all(branch_turns(never)[leaf] == 0)
    # The root is one and the same, and by an overwhelming alpha only the sign of the rise decides.
    strong = collect(ENTROPY, branch_alpha=1e6)
    rise = entropy_rise(strong, words("guess"))
    for i in np.flatnonzero(leaf):
        p = strong.parent[i]
        rising = [k for k in range(1, 4) if np.any(strong.mask[p] & (strong.turn[p] == k)) and rise[p, k] > 0]
        assert branch_turns(strong)[i] == (rising[0] if rising else 0)
    moderate = branch_turns(collect(ENTROPY, seed=3))[leaf]
    assert len(set(moderate.tolist())) > 1


def entropy_rise(traj, p):
    """Of the first 20 tokens of every turn against the first turn, slowly."""
    allowed = jnp.asarray(CODEC.sampleable)
    entropy = np.asarray(scoring.token_scores(POLICY, p, traj.tokens, traj.temperature, allowed=allowed)[1])
    out = np.zeros(traj.steps["played"].shape)
    for i in range(out.shape[0]):
        for k in range(out.shape[1]):
            at = np.flatnonzero(traj.mask[i] & (traj.turn[i] == k))[:20]
            out[i, k] = entropy[i, at].mean() / math.log(CODEC.vocab_size) if at.size else np.nan
    return np.nan_to_num(out - out[:, :1])


def test_the_rise_in_entropy_is_that_of_the_first_tokens():
    mask = np.zeros((2, 60), bool)
    mask[0, 1:31] = mask[0, 33:58] = mask[1, 2:5] = True
    traj = trajectory(mask, turns=3)
    turn = np.where(np.arange(60) < 31, 0, 1) * np.ones((2, 1), int)
    traj = traj._replace(turn=jnp.asarray(np.where(np.arange(60) < np.asarray(traj.length)[:, None], turn, -1)))
    entropy = np.zeros((2, 60), np.float32)
    entropy[0, 1:21], entropy[0, 21:31], entropy[0, 33:53], entropy[0, 53:] = 1.0, 50.0, 1.5, 70.0
    entropy[1], entropy[:, 0] = 2.0, 99.0
    score = lambda view, b: Score(b.adv, jnp.asarray(entropy), b.adv, b.bootstrap)  # noqa: E731
    tools = made_up_tools(traj, scores=score)
    found = trees._entropy_change(traj, branching.turn_starts(traj), tools)
    np.testing.assert_allclose(found, [[0, 0.5 / math.log(CODEC.vocab_size), 0], [0, 0, 0]], atol=1e-6)


def test_a_group_without_room_for_leaves_is_refused():
    for roots in (4, 5):
        with pytest.raises(ValueError, match=rf"roots must be below group_size \(4\), got {roots}"):
            trees.tree(roots).collect((), tools_of("guess", None), {}, KEY)
    with pytest.raises(ValueError, match="roots must be at least 1, got 0"):
        trees.tree(0)
    with pytest.raises(ValueError, match=r"Unknown rule 'random'. Known: uniform, entropy"):
        trees.tree(2, rule="random")
    with pytest.raises(ValueError, match="rolls must be at least 1, got 0"):
        trees.vine(0)
    with pytest.raises(ValueError, match="Unknown weight 'size'"):
        trees.tree_advantage("size")
    with pytest.raises(ValueError, match="depth must be at least 0, got -1"):
        trees.tree_advantage(depth=-1)


def test_nothing_grows_where_a_prompt_fills_the_row():
    full = trajectory(np.zeros((4, 12), bool), group=[0, 0, 1, 1], turns=4)
    full = full._replace(length=jnp.full(4, 12), turn=jnp.zeros((4, 12), jnp.int32))
    state = jnp.zeros((4, 5))

    def roll(key, call=0, start=None, episodes=8, group_size=4, record=False):
        assert (episodes, group_size, record) == (4, 2, call == 0)
        if start is None:
            return full._replace(record=state)
        assert not start.active.any() and not start.prefix.length.any()
        return full._replace(length=jnp.zeros(4, jnp.int32), turn=full.turn - 1)

    for part in (trees.tree(2), ENTROPY):
        numbers = {name: jnp.float32(value) for name, value in part.hyper.items()}
        tools = made_up_tools(full, groups=2, group_size=4)._replace(roll=roll)
        traj = part.collect((), tools, numbers, KEY)[1]
        assert traj.length.reshape(2, 4).tolist() == [[12, 12, 0, 0]] * 2 and not np.any(traj.mask)
        assert np.all(np.asarray(traj.parent) == -1)
        ids = np.asarray(trees.subtrees(traj))
        assert ids[:, 0].tolist() == [0, 0, -1, -1, 1, 1, -1, -1] and np.all(ids[:, 1] == -1)


# Advantages over trees


def families(traj, depth):
    """Slowly: rows share turn ``depth - 1`` when one inherited all of it from the other, or both from a third."""
    n = traj.length.shape[0]

    def source(i, k):
        while traj.parent[i] >= 0 and traj.turn[i, traj.branch[i]] > k:
            i = traj.parent[i]
        return i

    wrote = lambda i, k: np.any(traj.mask[i] & (traj.turn[i] == k))  # noqa: E731
    out = np.full((n, depth + 1), -1)
    out[:, 0] = np.where(traj.length > 0, traj.group, -1)
    for j in range(1, depth + 1):
        out[:, j] = [source(i, j - 1) if wrote(i, j - 1) else -1 for i in range(n)]
    return out


def tree_relative(ret, ids, weight):
    """TreePO's formula with loops."""
    out = np.zeros(len(ret))
    for i in range(len(ret)):
        top = bottom = 0.0
        for j in range(ids.shape[1]):
            mates = np.flatnonzero((ids[:, j] == ids[i, j]) & (ids[:, j] >= 0))
            if ids[i, j] < 0 or (j > 0 and mates.size < 2):
                continue
            w = mates.size if weight == "group_size" else 1.0
            top, bottom = top + w * (ret[i] - ret[mates].mean()), bottom + w
        out[i] = top / max(bottom, 1.0)
    return out


@pytest.mark.parametrize("weight, depth", [("group_size", 1), ("average", 3)])
def test_returns_are_compared_within_nested_subtrees(weight, depth):
    shared = 0
    for seed in range(3):
        traj = trees_of(seed)
        ids = np.asarray(trees.subtrees(traj, depth))
        np.testing.assert_array_equal(ids, families(traj, depth))
        shared += np.sum(ids[:, 1] != np.arange(8))
        rng = np.random.default_rng(seed)
        end = traj.length - 1
        reward = np.zeros_like(traj.reward)
        reward[np.arange(8), end] = rng.normal(size=8)
        b = scoring.as_batch(jax.tree.map(jnp.asarray, traj._replace(reward=reward)))
        out, metrics = apply(trees.tree_advantage(weight, depth=depth), traj, b=b)
        expected = tree_relative(reward.sum(axis=1), families(traj, depth), weight)
        np.testing.assert_allclose(out.adv, np.where(traj.mask, expected[:, None], 0), atol=1e-5)
        assert "zero_variance" in metrics
    assert shared > 6


@pytest.mark.parametrize(
    "weight, expected",
    [("group_size", [0.666667, -0.333333, -0.166667, -0.166667]), ("average", [0.625, -0.375, -0.125, -0.125])],
)
def test_tree_advantages_of_the_card(weight, expected):
    """Returns 1, 0, 0, 0, and two pairs that share their first turn."""
    mask = np.asarray([[0, 1, 0, 1, 1]] * 4, bool)
    reward = np.zeros((4, 5))
    reward[0, 4] = 1.0
    traj = trajectory(mask, reward=reward)
    turn = jnp.asarray([[0, 0, 1, 1, 1]] * 4)
    parent, branch = jnp.asarray([-1, 0, -1, 2]), jnp.asarray([-1, 3, -1, 3])
    traj = traj._replace(turn=turn, parent=parent, branch=branch)
    out, _ = apply(trees.tree_advantage(weight), traj)
    np.testing.assert_allclose(out.adv, np.where(mask, np.asarray(expected)[:, None], 0), atol=1e-6)
    # Leaves that share no more than the prompt are compared in the group alone.
    alone, _ = apply(trees.tree_advantage(weight), traj._replace(branch=jnp.asarray([-1, 1, -1, 1])))
    np.testing.assert_allclose(alone.adv[:, 1], [0.75, -0.25, -0.25, -0.25], atol=1e-6)


def test_shared_tokens_get_the_mean_of_their_rows():
    traj = trees_of(1)
    b = made_up_batch(jax.tree.map(jnp.asarray, traj))
    out, _ = apply(trees.shared_prefix(), traj, b=b)
    adv = np.asarray(b.adv)

    def owner(i, t):
        while traj.parent[i] >= 0 and t < traj.branch[i]:
            i = traj.parent[i]
        return i

    several = 0
    for t in range(traj.tokens.shape[1]):
        for i in range(8):
            mates = [j for j in range(8) if traj.mask[j, t] and owner(j, t) == owner(i, t)]
            expected = adv[mates, t].mean() if traj.mask[i, t] else 0.0
            np.testing.assert_allclose(out.adv[i, t], expected, atol=1e-6)
            several += traj.mask[i, t] and len(mates) > 1
    assert several > 10


# Step-DPO


def test_pairs_differ_from_one_turn_on_and_are_judged_by_what_follows():
    kept, turns = 0, set()
    for seed in range(4):
        traj = collect(trees.step_pairs(), seed=seed)
        check_tree(traj, 1)
        step = branch_turns(traj).reshape(2, 4)[:, 1:]
        assert np.all(step == step[:, :1])
        turns |= set(step.ravel().tolist())
        ret = np.random.default_rng(seed).integers(0, 3, 8)
        reward = np.zeros_like(traj.reward)
        reward[np.arange(8), traj.length - 1] = ret
        b = scoring.as_batch(jax.tree.map(jnp.asarray, traj._replace(reward=reward)))
        out, metrics = apply(trees.step_pairs(), traj, b=b)
        assert out.mask.shape == (2, 2, 1, traj.tokens.shape[1])
        for g in range(2):
            mine = ret[g * 4 : g * 4 + 4]
            pair = g * 4 + np.asarray([mine.argmax(), mine.argmin()])
            np.testing.assert_array_equal(out.traj.tokens[g, :, 0], traj.tokens[pair])
            expected = traj.mask[pair] & (traj.turn[pair] == step[g, 0]) & (mine.max() > mine.min())
            np.testing.assert_array_equal(out.mask[g, :, 0], expected)
            kept += expected.any(axis=1).all()
        assert 0 <= metrics["pairs_kept"] <= 1
    assert kept >= 4 and len(turns) > 1


# Whole steps


def step_of(*chain, config):
    """Parts under the plainest loss, that reads what they leave in the batch."""
    joined = parts.join(chain)

    def loss(scores, batch, hyper):
        return -jnp.sum(jnp.where(batch.mask, batch.adv * scores["policy"].logp, 0.0)), {}

    made = Algorithm(
        "test", joined.prepare, lambda batch, hyper, segments: batch, loss, joined.hyper, joined.needs, joined.init,
        joined.collect,
    )  # fmt: skip
    env = envs.make("probe_transition")
    init = train.make_init(POLICY, CODEC, env, made, config)
    return init(KEY, params=words("delayed")), jax.jit(train.make_step(POLICY, CODEC, env, made, config))


CONFIG = train.TrainConfig(episodes=8, group_size=4, max_tokens=32, slots=8, update=UpdateConfig(optimizer="sgd"))


def test_a_step_trains_on_what_was_collected():
    state, step = step_of(trees.vine(2), trees.vine_advantage(), config=CONFIG)
    moved = 0
    for _ in range(4):
        after, metrics = step(state)
        assert all(np.isfinite(float(total)) for total, _ in metrics.values()), metrics
        assert float(metrics["extra_tokens"][0]) > 0 and "mc_value" in metrics
        moved += any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (after.params, state.params)), strict=True))
        state = after
    assert moved and int(state.skipped) == 0 and step._cache_size() == 1


def test_contexts_that_restart_are_refused_before_anything_is_compiled():
    for part in (trees.vine(2), trees.vine_advantage(), trees.tree(2), trees.tree_advantage(), trees.shared_prefix()):
        with pytest.raises(ValueError, match="segments must be 1, got 2"):
            step_of(part, config=CONFIG._replace(segments=2))
