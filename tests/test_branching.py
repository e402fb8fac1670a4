"""Rollouts that continue from the middle: a branch is its parent up to a token, and a fresh episode from there on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.key_reuse import _core as key_reuse
from rollout_oracle import Talk, talk
from tiny import CODEC, POLICY, biased, params

from agentrl_jax import branching, envs, parallel, scoring
from agentrl_jax.branching import branch, turn_starts
from agentrl_jax.envs import canonical_params
from agentrl_jax.rollout import rollout
from agentrl_jax.types import Start

N, T, K = 8, 64, 4
CALM = Talk(restart=0.0)
"""One context an episode, whose replies, rewards and end are random."""


def whole(state):
    return state


@functools.cache
def env_of(name):
    return talk(max_turns=K) if name == "talk" else envs.make("guess", max_turns=K)


def env_params_of(name):
    return canonical_params(CALM if name == "talk" else env_of(name).params._replace(teacher_noise=0.0))


def playing(name, **options):
    env, env_params = env_of(name), env_params_of(name)
    sizes = {"episodes": N, "slots": 3, "max_tokens": T, "group_size": 2, "record": whole, "chunk": 7} | options
    return lambda p, key, start: rollout(POLICY, CODEC, env, p, key, start=start, env_params=env_params, **sizes)


@functools.cache
def program(name):
    """Serves parents, whose prefix has no length, and branches, with and without a teacher."""
    return jax.jit(playing(name))


def words(name):
    return biased(b"abc", 2.0, 5.0) if name == "talk" else biased(b"0123456789", 6.0, 7.0)


def play(name, seed, start):
    teacher = jnp.zeros(N, jnp.int32) if start.teacher_turns is None else start.teacher_turns
    return program(name)(words(name), jax.random.key(seed), start._replace(teacher_turns=teacher))


def from_resets(temperature=1.0):
    ids = jnp.arange(N, dtype=jnp.int32)
    heat = jnp.full(N, temperature, jnp.float32)
    return Start(ids // 2 + 100, ids // 2, jnp.ones(N, bool), temperature=heat)


@functools.cache
def parents(name, temperature=1.0):
    key, index = jax.random.key(0), jnp.zeros(N, jnp.int32)
    traj = jax.eval_shape(playing(name), words(name), key, from_resets())
    nothing = jax.eval_shape(branch, traj, index, index).prefix
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nothing)
    return play(name, 0, from_resets(temperature)._replace(prefix=empty))


@functools.cache
def program_of_branch():
    return jax.jit(branch)


def own_tokens(traj, seed, first=False):
    """A token of the agent in every row; the first of its action."""
    rng = np.random.default_rng(seed)
    if first:
        starts = np.asarray(turn_starts(traj))
        return np.asarray([rng.choice(row[row >= 0]) for row in starts], np.int32)
    return np.asarray([rng.choice(np.flatnonzero(row)) for row in np.asarray(traj.mask)], np.int32)


def numpy(tree):
    return jax.tree.map(np.asarray, tree)


def assert_continues(found, traj, token, row=None, rows=None):
    """Rows of ``found`` equal those of ``traj``, and say where they come from."""
    row = np.arange(N) if row is None else row
    rows = np.arange(len(row)) if rows is None else rows
    a, b = numpy(found), numpy(traj)
    np.testing.assert_array_equal(a.parent[rows], row)
    np.testing.assert_array_equal(a.branch[rows], token)
    skip = {"episode": 0, "parent": 0, "branch": 0, "logp": 0}
    a, b = (jax.tree.map(lambda x, i=i: x[i], t) for t, i in ((a, rows), (b, row)))
    np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, a._replace(**skip), b._replace(**skip))


# What a branch is


@pytest.mark.parametrize("name", ["talk", "guess"])
@pytest.mark.parametrize("first", [True, False])
def test_with_the_keys_of_its_parent_a_branch_is_its_parent_again(name, first):
    """Every draw, of tokens and of the environment, follows from the key, the id, and what was written before."""
    traj = parents(name)
    token = own_tokens(traj, seed=first, first=first)
    assert not first or np.any(np.asarray(traj.turn)[np.arange(N), token] > 0)
    start = program_of_branch()(traj, np.arange(N), token)
    assert_continues(play(name, 0, start), traj, token)


def test_greedily_a_branch_repeats_its_parent_under_any_key():
    traj = parents("guess", 0.0)
    row = np.asarray([7, 7, 0, 3, 3, 5, 1, 2])
    for seed in (1, 2):
        token = own_tokens(traj, seed)[row]
        start = program_of_branch()(traj, row, token)
        assert_continues(play("guess", 40 + seed, start), traj, token, row)


def test_a_branch_shares_what_lies_before_and_draws_the_rest_anew():
    traj = numpy(parents("talk"))
    row, token = np.asarray([2, 2, 2, 2, 5, 5, 6, 6]), own_tokens(traj, 3)
    token = token[row]
    start = program_of_branch()(traj, row, token)
    found = numpy(play("talk", 9, start))
    for i, (r, t) in enumerate(zip(row, token, strict=True)):
        for field in ("tokens", "mask", "expert", "logp", "reward", "turn"):
            np.testing.assert_array_equal(getattr(found, field)[i, :t], getattr(traj, field)[r, :t], err_msg=field)
        k = traj.turn[r, t]
        for key, value in found.steps.items():
            np.testing.assert_array_equal(value[i, :k], traj.steps[key][r, :k], err_msg=key)
        assert found.steps["anchor"][i, k] == traj.steps["anchor"][r, k]
        jax.tree.map(lambda x, y, i=i, r=r, k=k: np.testing.assert_array_equal(x[i, : k + 1], y[r, : k + 1]),
                     found.record, traj.record)  # fmt: skip
        assert found.mask[i, t] and found.turn[i, t] == k and found.length[i] > t
        np.testing.assert_allclose(found.reward[i].sum(), found.steps["reward"][i].sum(), atol=1e-5)
    np.testing.assert_array_equal(found.task, traj.task[row])
    np.testing.assert_array_equal(found.group, traj.group[row])
    np.testing.assert_array_equal(found.temperature, traj.temperature[row])
    own = [tuple(found.tokens[i, t : found.length[i]]) for i, t in enumerate(token)]
    assert len(set(own[:4])) == 4  # and none of them is what their parent wrote
    assert tuple(traj.tokens[2, token[0] : traj.length[2]]) not in own


def test_sampled_tokens_of_a_branch_are_scored_as_they_were_sampled():
    traj = parents("guess")
    found = play("guess", 5, program_of_branch()(traj, np.arange(N), own_tokens(traj, 5)))
    allowed = jnp.asarray(CODEC.sampleable)
    logp = scoring.token_scores(POLICY, words("guess"), found.tokens, found.temperature, allowed=allowed)[0]
    np.testing.assert_allclose(np.asarray(logp)[found.mask], np.asarray(found.logp)[found.mask], atol=1e-4)


def test_episodes_without_a_prefix_begin_at_their_reset():
    plain = jax.jit(playing("talk"))(words("talk"), jax.random.key(0), from_resets())
    traj = parents("talk")
    assert np.all(np.asarray(traj.parent) == -1) and np.all(np.asarray(traj.branch) == -1)
    np.testing.assert_allclose(plain.logp, traj.logp, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, plain._replace(logp=0), traj._replace(logp=0))


def test_branches_and_fresh_episodes_are_played_together():
    traj = parents("talk")
    token = own_tokens(traj, 1)
    start = program_of_branch()(traj, np.arange(N), token)
    some = np.arange(N) % 3 == 0
    mixed = start._replace(prefix=start.prefix._replace(length=jnp.where(some, start.prefix.length, 0)))
    found = play("talk", 0, mixed)
    assert_continues(found, traj, token[some], np.flatnonzero(some), np.flatnonzero(some))
    assert np.all(np.asarray(found.parent)[~some] == -1) and np.all(np.asarray(found.branch)[~some] == -1)
    # The prefix of these is not looked at, and with the same key and ids they are what they were.
    straight = jax.tree.map(lambda x: x[~some], numpy(found)._replace(parent=np.zeros(N), branch=np.zeros(N)))
    before = jax.tree.map(lambda x: x[~some], numpy(traj)._replace(parent=np.zeros(N), branch=np.zeros(N)))
    np.testing.assert_allclose(straight.logp, before.logp, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, straight._replace(logp=0), before._replace(logp=0))


def test_what_is_no_token_of_the_agent_is_not_played():
    traj = parents("talk")
    good = own_tokens(traj, 2)
    length = np.asarray(traj.length)
    row = np.asarray([0, -1, N, 3, 4, 5, 6, 7])
    token = np.asarray([good[0], good[1], good[2], 0, -1, T, length[6], good[7]], np.int32)
    start = program_of_branch()(traj, row, token)
    assert start.active.tolist() == [True] + [False] * 6 + [True]
    found = numpy(play("talk", 0, start))
    assert found.length[1:7].tolist() == [0] * 6 and not found.mask[1:7].any()
    assert found.parent.tolist() == [0] + [-1] * 6 + [7] and found.branch.tolist() == [good[0], *[-1] * 6, good[7]]
    assert not found.terminated[1:7].any() and not found.truncated[1:7].any()
    assert not any(np.any(x[1:7]) for x in found.steps.values())
    assert_continues(found, traj, token[[0, 7]], np.asarray([0, 7]), np.asarray([0, 7]))


def test_prefixes_that_cannot_go_on_are_not_played():
    traj = parents("talk")
    start = program_of_branch()(traj, np.arange(N), own_tokens(traj, 4))
    budget = CODEC.max_tokens(env_of("talk").spec.max_action) + 1
    p = start.prefix
    bad = p._replace(
        length=p.length.at[0].set(T).at[1].set(-1),
        turns=p.turns.at[2].set(K).at[3].set(-1),
        began=p.began.at[4].set(p.length[4] + 1).at[5].set(p.length[5] - budget),
    )
    _, active = jax.jit(lambda x: branching.settle(x, start.active, CODEC.pad, budget, K))(bad)
    assert active.tolist() == [False] * 6 + [True] * 2
    found = play("talk", 0, start._replace(prefix=bad))
    assert np.asarray(found.length)[:6].tolist() == [0] * 6 and np.all(np.asarray(found.parent)[:6] == -1)
    assert np.all(np.asarray(found.length)[6:] > 0)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_any_branch_is_a_stream_within_its_room(seed):
    rng = np.random.default_rng(seed)
    traj = numpy(parents("talk"))
    row, token = rng.integers(-1, N + 1, N), rng.integers(-1, T + 1, N)
    found = numpy(play("talk", seed, program_of_branch()(traj, row, token.astype(np.int32))))
    for i in range(N):
        inside = 0 <= row[i] < N and 0 <= token[i] < T and traj.mask[row[i], token[i]]
        assert (found.length[i] > 0) == inside
        if inside:
            n, t = found.length[i], token[i]
            assert t < n <= T and found.mask[i, t] and found.terminated[i] != found.truncated[i]
            assert np.all(found.tokens[i, n:] == CODEC.pad) and np.all(found.turn[i, n:] == -1)
            assert np.all(np.isin(np.diff(found.turn[i, :n]), (0, 1)))
            assert np.sum(found.reward[i] != 0) == np.sum(found.steps["reward"][i] != 0)


# The teacher


def test_the_teacher_writes_the_turns_that_are_its_own():
    traj = parents("guess")
    token = own_tokens(traj, 0, first=True)
    start = program_of_branch()(traj, np.arange(N), token)
    turn = np.asarray(start.prefix.turns)
    assert len(set(turn.tolist())) > 1
    lead = start._replace(teacher_turns=jnp.asarray(turn + np.arange(N) % 2, jnp.int32))
    found = numpy(play("guess", 0, lead))
    for i, t in enumerate(token):
        assert found.expert[i, t] == bool(i % 2) and found.mask[i, t]
        if i % 2:  # binary search from what the replies left of the range
            action = bytes(x for x in found.tokens[i][found.mask[i] & (found.turn[i] == turn[i])] if x < 256)
            state = jax.tree.map(lambda x, i=i: x[i, turn[i]], traj.record)
            assert int(action) == int(state.low + (state.high - state.low) // 2)
        assert not found.expert[i][found.turn[i] > turn[i]].any()
        assert not found.logp[i][found.expert[i]].any()


@functools.cache
def teacher_alone():
    env, sizes = env_of("talk"), {"episodes": N, "slots": 3, "max_tokens": T, "env_params": env_params_of("talk")}
    return jax.jit(lambda key, start: rollout(None, CODEC, env, None, key, start=start, **sizes))


@pytest.mark.parametrize("name", ["talk", "guess", "alone"])
def test_an_expert_writes_on_what_was_begun(name):
    """Its whole action stands behind the tokens that are there, as far as the budget allows."""
    traj = parents(name.replace("alone", "talk"))
    token = own_tokens(traj, 6)
    start = program_of_branch()(traj, np.arange(N), token)._replace(teacher_turns=jnp.full(N, K, jnp.int32))
    found = numpy(teacher_alone()(jax.random.key(0), start) if name == "alone" else play(name, 0, start))
    budget = CODEC.max_tokens(env_of(name.replace("alone", "talk")).spec.max_action) + 1
    began = np.asarray(start.prefix.began)
    assert np.any(token > began)
    for i, t in enumerate(token):
        np.testing.assert_array_equal(found.tokens[i, :t], np.asarray(traj.tokens)[i, :t])
        mine = found.mask[i] & (found.turn[i] == found.turn[i, t])
        assert not found.expert[i, :t].any()
        np.testing.assert_array_equal(found.expert[i, t:], found.mask[i, t:])
        assert np.all(np.diff(np.flatnonzero(mine)) == 1) and np.flatnonzero(mine)[0] == began[i]
        cut = found.steps["cut"][i, found.turn[i, t]]
        assert mine.sum() == budget if cut else mine.sum() <= budget
        assert found.tokens[i][mine][-1] == CODEC.end_action or found.truncated[i] or cut
    assert np.all(found.terminated | found.truncated)


# Turn boundaries


def test_turn_starts_are_where_the_agent_begins_to_write():
    traj = numpy(parents("talk"))
    expected = np.full((N, K), -1)
    for i in range(N):
        for t in range(T - 1, -1, -1):
            if traj.mask[i, t]:
                expected[i, traj.turn[i, t]] = t
    np.testing.assert_array_equal(jax.jit(turn_starts)(traj), expected)
    assert np.any(expected == -1) and np.all(traj.tokens[np.arange(N), expected[:, 0] - 1] == CODEC.open_action)
    none = jax.tree.map(np.zeros_like, traj)
    assert np.all(np.asarray(turn_starts(none)) == -1)


# Programs


def test_branches_of_any_place_are_one_program_over_seeds_too():
    traj = parents("guess")
    fn = lambda p, key, traj, row, token: playing("guess")(p, key, branch(traj, row, token))  # noqa: E731
    fn = jax.jit(jax.vmap(fn, (None, 0, None, None, None)))
    for seed, row in enumerate((np.arange(N), np.full(N, 3), np.arange(N) - 2)):
        token, keys = own_tokens(traj, seed)[row], jax.random.split(jax.random.key(seed), 2)
        both = numpy(fn(words("guess"), keys, traj, row, token))
        assert fn._cache_size() == 1
        start = program_of_branch()(traj, row, token)
        start = start._replace(teacher_turns=jnp.zeros(N, jnp.int32))
        for i in range(2):
            a, b = jax.tree.map(lambda x, i=i: x[i], both), program("guess")(words("guess"), keys[i], start)
            np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)
            jax.tree.map(np.testing.assert_array_equal, a._replace(logp=0), b._replace(logp=0))
    assert program("guess")._cache_size() == 1


def test_devices_share_branches_out():
    """The expert plays on, which compiles fastest: what is split and put together is the same."""
    traj, row = parents("talk"), np.asarray([7, 6, 5, 4, 3, 2, 1, 0])
    start = program_of_branch()(traj, row, own_tokens(traj, 2)[row])
    start = start._replace(teacher_turns=jnp.full(N, K, jnp.int32))
    roll, env = parallel.sharded_rollout(parallel.make_mesh()), env_of("talk")
    sizes = {"episodes": N, "slots": N, "max_tokens": T, "env_params": env_params_of("talk")}
    fn = jax.jit(lambda key, start: roll(None, CODEC, env, None, key, start=start, **sizes))
    found, alone = numpy(fn(jax.random.key(11), start)), numpy(teacher_alone()(jax.random.key(11), start))
    np.testing.assert_array_equal(found.parent, row)
    jax.tree.map(np.testing.assert_array_equal, found, alone)


def test_no_key_is_used_twice():
    traj = parents("guess")
    start = program_of_branch()(traj, np.arange(N), own_tokens(traj, 8))
    key_reuse.check_key_reuse(lambda p, key: playing("guess")(p, key, start), params(), jax.random.key(0))


# What is refused


@pytest.mark.parametrize(
    "change, options, message",
    [
        (lambda p: p._replace(tokens=p.tokens[:, :-1]), {}, r"start.prefix.tokens must have shape \(8, 64\)"),
        (lambda p: p._replace(mask=p.mask[:4]), {}, r"start.prefix.mask must have shape \(8, 64\), got \(4, 64\)"),
        (lambda p: p._replace(written=0), {}, r"start.prefix.written must have shape \(8,\), got \(\)"),
        (lambda p: p, {"max_tokens": T + 1}, r"start.prefix.tokens must have shape \(8, 65\), got \(8, 64\)"),
        (lambda p: p, {"segments": 2}, "segments must be 1, got 2"),
        (lambda p: p._replace(steps={}), {}, r"start.prefix.steps lacks \['anchor', 'cut', 'malformed'"),
        (
            lambda p: p._replace(steps=p.steps | {"cut": p.steps["cut"][:, :2]}),
            {},
            r"start.prefix.steps\['cut'\] must have shape \(8, 4\), got \(8, 2\)",
        ),
        (lambda p: p._replace(env=p.env.turn), {}, "start.prefix.env must be the state of guess"),
        (
            lambda p: p._replace(env=p.env._replace(low=p.env.low.astype(jnp.float32))),
            {},
            r"start.prefix.env.low must be the state of guess .*int32.*, got .*float32",
        ),
        (lambda p: p._replace(record=None), {}, "start.prefix.record must be given, since the rollout keeps a record"),
        (lambda p: p._replace(record=p.record.turn), {}, "start.prefix.record must be what record= keeps"),
        (
            lambda p: p._replace(record=p.record._replace(turn=p.record.turn[:, 1:])),
            {},
            r"start.prefix.record.turn must be what record= keeps .*\(8, 5\)",
        ),
    ],
)
def test_a_prefix_that_does_not_fit_is_refused(change, options, message):
    traj = parents("guess")
    start = program_of_branch()(traj, np.arange(N), own_tokens(traj, 0))
    begin = start._replace(prefix=change(start.prefix))
    with pytest.raises(ValueError, match=message):
        playing("guess", **options)(words("guess"), jax.random.key(0), begin)


def test_a_prefix_of_another_environment_is_refused():
    traj = parents("guess")
    start = program_of_branch()(traj, np.arange(N), own_tokens(traj, 0))
    with pytest.raises(ValueError, match=r"start.prefix.steps lacks"):
        playing("talk")(words("talk"), jax.random.key(0), start)


@pytest.mark.parametrize(
    "change, row, token, message",
    [
        ({"record": None}, [0], [3], "branch needs the states that traj.record keeps"),
        ({"segment": np.arange(N) % 2}, [0], [3], "branch continues rows of one context: roll with segments=1"),
        ({}, [0, 1], [3], r"row and token must have one shape \(N,\), got \(2,\) and \(1,\)"),
        ({}, 0, 3, r"row and token must have one shape \(N,\), got \(\) and \(\)"),
    ],
)
def test_what_cannot_be_branched_is_refused(change, row, token, message):
    traj = parents("guess")._replace(**change)
    with pytest.raises(ValueError, match=message):
        branch(traj, np.asarray(row), np.asarray(token))


def test_rows_of_a_later_context_are_not_played():
    """Where segments are traced they cannot be refused."""
    traj = parents("talk")._replace(segment=jnp.arange(N) % 2)
    start = program_of_branch()(traj, np.arange(N), own_tokens(traj, 0))
    assert start.active.tolist() == [True, False] * (N // 2)
