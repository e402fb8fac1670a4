"""The rollout against a slow oracle, and what must not change it: schedule, neighbours, order, vmap."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.key_reuse import _core as key_reuse
from rollout_oracle import Talk, assert_equal, play, talk
from tiny import CODEC, POLICY, biased, params

from agentrl_jax import TransformerConfig, codecs, envs, scoring, text, transformer_policy
from agentrl_jax.envs import canonical_params
from agentrl_jax.rollout import assign_tasks, rollout, rollout_with_stats
from agentrl_jax.types import Start

N, T, G, SHORT = 8, 40, 2, 14


def start(**fields):
    """Every field given, so that one program serves all."""
    n = fields.pop("episodes", N)
    ids = jnp.arange(n, dtype=jnp.int32)
    default = {
        "task": ids // G + 100,
        "group": ids // G,
        "active": jnp.ones(n, bool),
        "temperature": jnp.ones(n),
        "teacher_turns": jnp.zeros(n, jnp.int32),
    }
    return Start(**(default | {k: jnp.asarray(v, default[k].dtype) for k, v in fields.items()}))


def talking(env=None, tokens=T, segments=2, **sizes):
    env = talk() if env is None else env
    sizes = {"slots": 3} | sizes
    return lambda p, key, start, ids, env_params: rollout_with_stats(
        POLICY, CODEC, env, p, key, episodes=N, max_tokens=tokens, group_size=G, start=start, episode_ids=ids,
        env_params=env_params, segments=segments, record=lambda s: s, **sizes,
    )  # fmt: skip


SCHEDULES = {
    "some": {},
    "one": {"slots": 1, "chunk": 3, "feed_rows": 1, "env_rows": 1, "max_wait": 0},
    "all": {"slots": N, "chunk": 64, "feed_rows": N, "env_rows": N, "max_wait": 2},
}


@functools.cache
def program(schedule="some"):
    return jax.jit(talking(**SCHEDULES[schedule]))


@functools.cache
def short():
    """Little room, and a cut action ends the episode."""
    return jax.jit(talking(talk("end"), SHORT, 1))


def run(fn=None, p=None, seed=0, ids=None, env_params=None, **fields):
    ids = jnp.arange(N, dtype=jnp.int32) if ids is None else jnp.asarray(ids, jnp.int32)
    p = biased(b"abc", 2.0, 5.0) if p is None else p
    env_params = canonical_params(Talk() if env_params is None else env_params)
    out = (program() if fn is None else fn)(p, jax.random.key(seed), start(**fields), ids, env_params)
    return jax.tree.map(np.asarray, out[0])


def rows(traj, which, segments=2):
    """Rows of some episodes, without the fields that say where they stand."""
    index = np.concatenate([np.arange(e * segments, (e + 1) * segments) for e in which])
    traj = traj._replace(episode=np.zeros_like(traj.episode))
    return jax.tree.map(lambda x: x[index], traj)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_same_but_for_rounding(a, b):
    np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)
    assert_same(a._replace(logp=0), b._replace(logp=0))


def check_stream(traj, spec, segments=2):
    """What holds of any rollout: grammar of the stream, masks, rewards, flags, lengths."""
    limit = traj.tokens.shape[1]
    control = {CODEC.pad, CODEC.start, CODEC.open_observation, CODEC.open_action, CODEC.end_action}
    assert np.all(traj.length <= limit)
    for i, n in enumerate(traj.length):
        tokens, mask, turn = traj.tokens[i], traj.mask[i], traj.turn[i]
        assert np.all(tokens[n:] == CODEC.pad) and not mask[n:].any() and np.all(turn[n:] == -1)
        assert not np.any(traj.logp[i][~mask | traj.expert[i]]) and not np.any(traj.expert[i] & ~mask)
        assert not np.any(traj.reward[i][~mask])
        assert not (traj.terminated[i] and traj.truncated[i])
        if n == 0:
            continue
        assert tokens[0] == CODEC.start and CODEC.start not in tokens[1:n] and CODEC.pad not in tokens[:n]
        writing, size = False, 0
        for t in range(1, n):
            token = int(tokens[t])
            assert bool(mask[t]) == writing
            assert turn[t] - turn[t - 1] in ((0, 1) if token == CODEC.open_observation else (0,))
            if writing:
                size += 1
                assert token in range(256) or token == CODEC.end_action
                assert size <= spec.max_action + 1
                writing = token != CODEC.end_action and size < spec.max_action + 1
            else:
                assert token in range(256) or token in control - {CODEC.end_action, CODEC.pad, CODEC.start}
                writing, size = token == CODEC.open_action, 0
        np.testing.assert_allclose(traj.reward[i].sum(), traj.steps["reward"][i].sum(), atol=1e-5)
        assert np.sum(traj.reward[i] != 0) == np.sum(traj.steps["reward"][i] != 0)
    over = (traj.terminated | traj.truncated).reshape(-1, segments)
    played = (traj.length > 0).reshape(-1, segments)
    last = played.sum(1) - 1
    assert np.all(over.sum(1) == played[:, 0])
    assert np.all(over[np.arange(len(last)), last] | ~played[:, 0])


# The oracle


def test_talk_agrees_with_the_oracle():
    heat, teacher = [1, 0.7, 1, 0, 1.5, 1, 1, 0.5], [0, 0, 1, 0, 0, 2, 9, 0]
    traj = run(temperature=heat, teacher_turns=teacher)
    check_stream(traj, talk().spec)
    for e in range(N):
        expected = play(
            POLICY, talk(), biased(b"abc", 2.0, 5.0), jax.random.key(0), episode=e, max_tokens=T, task=100 + e // G,
            temperature=heat[e], teacher_turns=teacher[e], segments=2, record=lambda s: s,
        )  # fmt: skip
        assert_equal(traj, e, expected, segments=2)
    assert traj.length.reshape(-1, 2)[:, 1].any() and traj.terminated.any() and traj.truncated.any()
    np.testing.assert_array_equal(traj.group, np.repeat(np.arange(N) // G, 2))
    np.testing.assert_array_equal(traj.task, np.repeat(np.arange(N) // G + 100, 2))
    np.testing.assert_array_equal(traj.temperature, np.repeat(np.asarray(heat, np.float32), 2))


def test_a_cut_action_ends_the_episode_where_the_environment_says_so():
    p = biased(b"abc", 1.0, 4.0)
    env_params = Talk(prompt=2, reply=0, end=0.0, cut=0.0, restart=0.0)
    traj = run(short(), p, env_params=env_params)
    check_stream(traj, talk("end").spec, 1)
    for e in range(N):
        expected = play(
            POLICY,
            talk("end"),
            p,
            jax.random.key(0),
            episode=e,
            max_tokens=SHORT,
            task=100 + e // G,
            env_params=env_params,
        )
        assert_equal(traj, e, expected)
    cut = traj.steps["cut"].any(1)
    assert cut.any() and not cut.all() and traj.truncated[cut].all()
    assert not (traj.steps["cut"] & traj.steps["played"]).any()


def test_guess_agrees_with_the_oracle_and_draws_its_own_tasks():
    env = envs.make("guess", max_turns=5)
    p, key = biased(b"0123456789", 6.0, 7.0), jax.random.key(3)
    traj = jax.jit(
        lambda p, key: rollout(POLICY, CODEC, env, p, key, episodes=4, slots=2, max_tokens=72, group_size=2, version=7)
    )(p, key)
    traj = jax.tree.map(np.asarray, traj)
    check_stream(traj, env.spec, 1)
    assert traj.record is None and np.all(traj.version == 7)
    for e in range(4):
        assert_equal(traj, e, play(POLICY, env, p, key, episode=e, group=e // 2, max_tokens=72))
    assert traj.task[0] == traj.task[1] != traj.task[2] == traj.task[3] and traj.group.tolist() == [0, 0, 1, 1]
    task, group = assign_tasks(key, Start(), jnp.arange(4), 2)
    np.testing.assert_array_equal(task, traj.task)
    np.testing.assert_array_equal(group, traj.group)
    assert (traj.steps["played"].sum(1) > 1).all()
    for name in ("tokens", "turn"):  # a group shares its prompt, and nothing that it writes
        x = getattr(traj, name)
        prompt = traj.mask.argmax(1)
        assert prompt[0] == prompt[1] and x[0, : prompt[0]].tolist() == x[1, : prompt[0]].tolist()
    written = [traj.tokens[i][traj.mask[i]].tolist() for i in range(4)]
    assert all(a[:6] != b[:6] for i, a in enumerate(written) for b in written[:i])


def test_calculator_agrees_with_the_oracle():
    env = envs.make("calculator", max_operators=1, max_digits=2, max_depth=0)
    p, key, teacher = biased(b"0123456789 \n", 6.0, 7.0), jax.random.key(5), [1, 0, 2]
    begin = Start(teacher_turns=jnp.asarray(teacher, jnp.int32))
    traj = jax.jit(
        lambda p, key: rollout(POLICY, CODEC, env, p, key, episodes=3, slots=2, max_tokens=120, start=begin)
    )(p, key)
    traj = jax.tree.map(np.asarray, traj)
    check_stream(traj, env.spec, 1)
    for e in range(3):
        assert_equal(traj, e, play(POLICY, env, p, key, episode=e, max_tokens=120, teacher_turns=teacher[e]))
    assert traj.steps["malformed"].any() and traj.steps["tool_calls"].any() and traj.steps["played"].sum(1).max() > 2
    # An error of the tool is an observation like any other: shown, not trained, and the episode goes on.
    shown = [bytes(t for t in row[~mask] if t < 256) for row, mask in zip(traj.tokens, traj.mask, strict=True)]
    assert any(b"error" in said for said in shown)
    lines = traj.steps["thinking"]
    action = lambda i, k: bytes(t for t in traj.tokens[i][traj.mask[i] & (traj.turn[i] == k)] if t < 256)  # noqa: E731
    for i, k in np.argwhere(traj.steps["played"] & ~traj.steps["cut"]):
        assert lines[i, k] == action(i, k).rstrip().rfind(b"\n") + 1


@functools.cache
def restarting():
    env = envs.make("probe_restart")
    return jax.jit(
        lambda p, key, heat, k, mass: rollout(
            POLICY,
            CODEC,
            env,
            p,
            key,
            episodes=6,
            slots=4,
            max_tokens=12,
            segments=3,
            temperature=heat,
            top_k=k,
            top_p=mass,
        )
    )


def filtered(heat=1.0, k=264, mass=1.0):
    return jax.tree.map(np.asarray, restarting()(params(), jax.random.key(2), heat, k, mass))


def test_restarts_and_filters_agree_with_the_oracle():
    env = envs.make("probe_restart")
    traj = filtered(0.8, 40, 0.9)
    check_stream(traj, env.spec, 3)
    for e in range(6):
        filters = {"top_k": jnp.asarray(40), "top_p": jnp.asarray(0.9)}
        expected = play(
            POLICY, env, params(), jax.random.key(2), episode=e, max_tokens=12, segments=3, temperature=0.8,
            filters=filters,
        )  # fmt: skip
        assert_equal(traj, e, expected, segments=3)
    assert np.all(traj.length > 0) and np.all(traj.terminated == (traj.segment == 2))
    np.testing.assert_array_equal(traj.steps["played"].reshape(6, 3, 3), np.eye(3, dtype=bool)[None].repeat(6, 0))


def test_greedy_is_the_best_token_and_so_is_the_single_most_probable():
    greedy, single = filtered(heat=0.0), filtered(k=1)
    np.testing.assert_array_equal(greedy.tokens, single.tokens)
    hidden = POLICY.forward(params(), greedy.tokens).hidden[:, :-1]
    best = jnp.argmax(jnp.where(jnp.asarray(CODEC.sampleable), POLICY.logits(params(), hidden), -jnp.inf), -1)
    mask = greedy.mask[:, 1:]
    np.testing.assert_array_equal(greedy.tokens[:, 1:][mask], np.asarray(best)[mask])
    np.testing.assert_allclose(single.logp[single.mask], 0.0, atol=1e-6)
    np.testing.assert_allclose(greedy.logp[greedy.mask], rescored(greedy)[greedy.mask], atol=1e-5)


# What changes nothing


@pytest.mark.parametrize("schedule", ["one", "all"])
def test_the_schedule_changes_time_alone(schedule):
    fields = {"teacher_turns": [0, 1, 0, 0, 2, 0, 0, 9], "active": [1, 1, 0, 1, 1, 1, 1, 1]}
    some, other = run(**fields), run(program(schedule), **fields)
    assert_same_but_for_rounding(some, other)


def test_permuting_episodes_permutes_rows():
    order = np.asarray([5, 2, 7, 0, 1, 6, 3, 4])
    fields = {"task": np.arange(N) // G + 50, "teacher_turns": [0, 1, 0, 0, 2, 0, 0, 9], "temperature": [1, 0] * 4}
    fields |= {"group": np.arange(N) // G, "active": [1, 1, 1, 0, 1, 1, 1, 1]}
    straight = run(**fields)
    permuted = run(ids=order, **{k: np.asarray(v)[order] for k, v in fields.items()})
    assert_same_but_for_rounding(rows(permuted, range(N)), rows(straight, order))


def test_tasks_follow_the_ids_of_a_larger_batch():
    env = envs.make("probe_observation")
    begin = Start(teacher_turns=jnp.ones(N, jnp.int32))
    sizes = {"episodes": N, "slots": 4, "max_tokens": 8, "group_size": 2, "start": begin}
    fn = jax.jit(lambda key, ids: rollout(None, CODEC, env, None, key, episode_ids=ids, **sizes))
    order = np.asarray([5, 2, 7, 0, 1, 6, 3, 4])
    straight, permuted = (fn(jax.random.key(4), jnp.asarray(ids, jnp.int32)) for ids in (np.arange(N), order))
    assert_same(
        rows(jax.tree.map(np.asarray, permuted), range(N), 1), rows(jax.tree.map(np.asarray, straight), order, 1)
    )
    assert straight.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert straight.expert.any() and not straight.logp.any() and float(straight.reward.sum()) == N
    assert len(set(straight.tokens[:, 2].tolist())) == 2  # both digits are asked


def test_neighbours_change_nothing():
    quiet = run(task=[1] + [9] * 7)
    loud = run(task=[1] + [8] * 7, teacher_turns=[0] + [1] * 7, temperature=[1] + [0] * 7)
    assert_same(rows(quiet, [0]), rows(loud, [0]))
    assert not np.array_equal(quiet.tokens, loud.tokens)


def test_inactive_episodes_are_not_played():
    active = np.asarray([0, 1, 1, 0, 0, 1, 0, 1], bool)
    whole, part = run(), run(active=active)
    assert_same_but_for_rounding(rows(part, np.flatnonzero(active)), rows(whole, np.flatnonzero(active)))
    assert not part.length[np.repeat(~active, 2)].any()
    none = run(active=np.zeros(N, bool))
    assert not none.length.any() and not none.mask.any() and not none.terminated.any() and not none.truncated.any()


def test_randomness_is_in_the_key():
    first, again, other = run(seed=1), run(seed=1), run(seed=2)
    assert_same(first, again)
    assert not np.array_equal(first.tokens, other.tokens)
    written = [tuple(t[m][:4]) for t, m in zip(first.tokens, first.mask, strict=True) if m.sum() >= 4]
    assert len(set(written)) == len(written) > 4


@functools.cache
def over_seeds():
    return jax.jit(jax.vmap(talking(), (0, 0, None, None, None)))


def test_vmap_over_keys_and_parameters_equals_one_at_a_time():
    both = [biased(b"abc", 2.0, 5.0), biased(b"xyz", 2.0, 3.0, seed=1)]
    keys = jax.random.split(jax.random.key(6), 2)
    fields = {"teacher_turns": [0, 1, 0, 0, 2, 0, 0, 9]}
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *both)
    ids, env_params = jnp.arange(N, dtype=jnp.int32), canonical_params(Talk())
    vmapped, _ = over_seeds()(stacked, keys, start(**fields), ids, env_params)
    for i in range(2):
        alone, _ = program()(both[i], keys[i], start(**fields), ids, env_params)
        assert_same_but_for_rounding(
            *(jax.tree.map(np.asarray, t) for t in (jax.tree.map(lambda x, i=i: x[i], vmapped), alone))
        )


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def test_vmap_keeps_loops_loops_and_never_selects_a_cache():
    config = TransformerConfig(CODEC.vocab_size, layers=1, width=32, heads=2, kv_heads=1)
    policy, env, seeds, slots, tokens = transformer_policy(config), envs.make("guess"), 3, 4, 72

    def play_one(p, key):
        return rollout(policy, CODEC, env, p, key, episodes=6, slots=slots, max_tokens=tokens, group_size=2)

    p = jax.eval_shape(policy.init, jax.random.key(0))
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((seeds, *x.shape), x.dtype), p)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), seeds))
    plain = list(
        equations(jax.make_jaxpr(play_one)(p, keys[0] if hasattr(keys, "__getitem__") else jax.random.key(0)).jaxpr)
    )
    vmapped = list(equations(jax.make_jaxpr(jax.vmap(play_one))(stacked, keys).jaxpr))
    cache = {(seeds, *x.shape) for x in jax.tree.leaves(jax.eval_shape(lambda: policy.init_cache(slots, tokens)))}
    shapes = [tuple(v.aval.shape) for e in vmapped for v in e.outvars]
    assert cache & set(shapes)  # it is there, and nothing selects it
    assert not [e for e in vmapped if e.primitive.name == "select_n" and tuple(e.outvars[0].aval.shape) in cache]
    for name in ("while", "cond"):
        count = [sum(e.primitive.name == name for e in program) for program in (plain, vmapped)]
        assert count[0] == count[1] > 0
    assert all(e.invars[0].aval.shape == () for e in vmapped if e.primitive.name == "cond")
    for e in vmapped:
        if e.primitive.name == "while":
            assert e.params["cond_jaxpr"].jaxpr.outvars[0].aval.shape == ()
            names = [inner.primitive.name for inner in e.params["cond_jaxpr"].jaxpr.eqns]
            assert not names or names[-1] != "reduce_or" or e.params["cond_nconsts"] == 0
    assert not [e.primitive.name for e in plain if "callback" in e.primitive.name]


def test_no_key_is_used_twice():
    env = talk()
    begin = start()
    key_reuse.check_key_reuse(
        lambda p, key: rollout(POLICY, CODEC, env, p, key, episodes=N, slots=3, max_tokens=T, start=begin),
        params(), jax.random.key(0),
    )  # fmt: skip


def test_a_policy_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="the policy has 264 logits, and the codec 'byte' has 272 ids"):
        rollout(POLICY, codecs.byte(272), talk(), params(), jax.random.key(0), episodes=4, slots=2, max_tokens=8)


def test_tasks_and_play_draw_from_one_key_without_using_it_twice():
    env = envs.make("guess", max_turns=2)
    key_reuse.check_key_reuse(
        lambda p, key: rollout(POLICY, CODEC, env, p, key, episodes=4, slots=2, max_tokens=40, group_size=2),
        params(), jax.random.key(0),
    )  # fmt: skip


# What holds of every stream


def rescored(traj, p=None):
    allowed = jnp.asarray(CODEC.sampleable)
    return np.asarray(
        scoring.token_scores(POLICY, params() if p is None else p, traj.tokens, traj.temperature, allowed=allowed)[0]
    )


def test_scoring_repeats_the_sampling_log_probabilities_at_any_temperature():
    p = biased(b"abc", 1.0, 2.0)
    traj = run(p=p, temperature=[0.5, 0.7, 1.0, 1.5] * 2)
    assert traj.mask.sum() > 60
    np.testing.assert_allclose(rescored(traj, p)[traj.mask], traj.logp[traj.mask], atol=1e-4)


def test_the_end_of_an_action_is_trained_and_never_invented():
    at_once, never = run(p=biased(b"", 0, 60.0)), run(p=biased(b"", 0, -60.0))
    assert np.all(at_once.tokens[at_once.mask] == CODEC.end_action) and not at_once.steps["cut"].any()
    assert np.all(at_once.steps["size"] == 0)
    assert CODEC.end_action not in never.tokens
    np.testing.assert_array_equal(never.steps["cut"], never.steps["played"])
    assert never.steps["played"].sum() > N  # a cut action is delivered, and the episode goes on
    assert np.all(never.steps["size"][never.steps["played"]] == 5)
    for traj in (at_once, never):
        check_stream(traj, talk().spec)


def test_an_action_that_just_fits_its_budget_is_whole():
    """The expert writes up to ``max_action`` bytes and the end: six tokens are the whole budget."""
    traj = run(teacher_turns=[9] * N, seed=3)
    whole = traj.steps["played"] & (traj.steps["size"] == 5)
    assert whole.any() and not traj.steps["cut"].any()
    for i, k in np.argwhere(whole):
        action = traj.tokens[i][traj.mask[i] & (traj.turn[i] == k)]
        assert len(action) == 6 and action[-1] == CODEC.end_action


@pytest.mark.parametrize("cut_action", ["deliver", "end"])
def test_an_expert_beyond_the_budget_is_cut_like_anyone(cut_action):
    long, short = text.literal("too long", 8), text.literal("short", 8)
    env = talk(cut_action)._replace(expert=lambda k, s, p: text.where(jax.random.bernoulli(k), long, short))
    begin = Start(teacher_turns=jnp.full(4, 9, jnp.int32))
    sizes = {"episodes": 4, "slots": 2, "max_tokens": T, "segments": 2, "start": begin}
    traj = jax.jit(lambda key: rollout(None, CODEC, env, None, key, **sizes))(jax.random.key(1))
    traj = jax.tree.map(np.asarray, traj)
    for e in range(4):
        rows = play(None, env, None, jax.random.key(1), episode=e, max_tokens=T, segments=2, teacher_turns=9)
        assert_equal(traj, e, rows, segments=2)
    cut, played = traj.steps["cut"], traj.steps["played"]
    assert cut.any() and (played & ~cut).any() and (cut & played).any() == (cut_action == "deliver")


@settings(deadline=None, max_examples=25)
@given(
    prompt=st.integers(0, 12), reply=st.integers(0, 12), end=st.sampled_from([-9.0, 3.0, 5.0, 9.0]),
    chance=st.sampled_from([0.0, 0.3]), teacher=st.integers(0, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_stream_stays_inside_its_room(prompt, reply, end, chance, teacher, seed):
    env_params = Talk(prompt, reply, chance, chance, chance)
    traj = run(short(), biased(b"abc", 1.0, end), seed, env_params=env_params, teacher_turns=[teacher] * N)
    check_stream(traj, talk("end").spec, 1)
    assert np.all(traj.terminated | traj.truncated)
    full = traj.length == SHORT
    assert np.all(traj.truncated[full & ~traj.steps["success"].any(1)])
    if prompt == 12:  # start, opening, text, opening: one too many
        assert full.all() and not traj.mask.any()


def test_a_prompt_that_does_not_fit_is_cut_and_nothing_is_written():
    ids, env_params = jnp.arange(N, dtype=jnp.int32), canonical_params(Talk(prompt=12))
    traj, stats = short()(params(), jax.random.key(0), start(), ids, env_params)
    assert np.all(traj.length == SHORT) and traj.truncated.all() and not traj.mask.any()
    assert traj.tokens[0, :2].tolist() == [CODEC.start, CODEC.open_observation]
    assert int(stats.steps) == int(stats.decoded) == 0


def test_turn_limits_truncate_and_show_the_last_observation():
    never = Talk(prompt=1, reply=2, end=0.0, cut=0.0, restart=0.0)
    traj = run(p=biased(b"", 0, 60.0), env_params=never)
    first = traj.length.reshape(-1, 2)[:, 0] > 0
    assert first.all() and traj.truncated[::2].all() and not traj.length[1::2].any()
    np.testing.assert_array_equal(traj.steps["played"][::2].sum(1), 4)
    for i in range(0, 2 * N, 2):
        final = traj.turn[i] == 4
        assert final.any() and not traj.mask[i][final].any()
        # The critic is trained on what follows the opening of an action: there the bootstrap is read.
        assert traj.tokens[i][final][0] == CODEC.open_observation and traj.tokens[i][final][-1] == CODEC.open_action
    by_env = run(p=biased(b"", 0, 60.0), env_params=never._replace(cut=1.0))
    assert by_env.truncated[::2].all() and np.all(by_env.steps["played"][::2].sum(1) == 1)
    assert all(np.any(by_env.turn[i] == 1) for i in range(0, 2 * N, 2))
    by_task = run(p=biased(b"", 0, 60.0), env_params=never._replace(end=1.0, cut=1.0))
    assert by_task.terminated[::2].all() and not by_task.truncated.any() and not np.any(by_task.turn == 1)


def test_the_record_holds_every_state():
    traj = run()
    for i in range(2 * N):
        for k in np.flatnonzero(traj.steps["played"][i]):
            assert traj.record.turn[i, k] == k and traj.record.turn[i, k + 1] == k + 1
            assert traj.record.heard[i, k + 1] == traj.steps["heard"][i, k]


def test_the_schedule_is_counted_and_the_oldest_does_not_wait_for_long():
    p, ids, env_params = biased(b"abc", 2.0, 5.0), jnp.arange(N, dtype=jnp.int32), canonical_params(Talk())
    traj, stats = program()(p, jax.random.key(0), start(), ids, env_params)
    assert int(stats.decoded) == int(jnp.sum(traj.mask)) and int(stats.steps) == int(jnp.sum(traj.steps["played"]))
    # Fed: the stream without what was decoded in place, which is every sampled token but the last of an action.
    assert 0 < int(stats.fed) <= int(jnp.sum(traj.length))
    _, eager = program("all")(p, jax.random.key(0), start(), ids, env_params)
    assert int(eager.iterations) < int(stats.iterations)


# What is refused


def no_expert():
    return talk()._replace(expert=None)


TEACHER = Start(teacher_turns=jnp.ones(4, jnp.int32))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"episodes": 0}, "episodes must be at least 1, got 0"),
        ({"slots": 0}, "slots must be at least 1, got 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 4}, "max_tokens must be at least 5, an empty prompt and one byte of action, got 4"),
        ({"group_size": 0}, "group_size must be at least 1, got 0"),
        ({"segments": 0}, "segments must be at least 1, got 0"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"feed_rows": 0}, "feed_rows must be at least 1, got 0"),
        ({"env_rows": -1}, "env_rows must be at least 1, got -1"),
        ({"max_wait": -3}, "max_wait must not be negative, got -3"),
        ({"group_size": 3}, r"episodes \(4\) must be a multiple of group_size \(3\)"),
        ({"slots": 5}, r"slots \(5\) must be at most episodes \(4\)"),
        ({"env": talk()._replace(spec=talk().spec._replace(roles=2))}, "talk has 2 roles"),
        ({"start": Start(prefix=0)}, "start.prefix must be a Prefix"),
        ({"env": no_expert(), "start": TEACHER}, "teacher_turns needs an expert, and talk has none"),
        ({"policy": None}, "policy is None: start.teacher_turns must be given"),
        ({"start": Start(active=jnp.ones(3, bool))}, r"start.active must have shape \(4,\), got \(3,\)"),
        ({"start": Start(temperature=jnp.ones(()))}, r"start.temperature must have shape \(4,\), got \(\)"),
        ({"temperature": -1.0}, "temperature must not be negative, got -1.0"),
        ({"temperature": np.float32(-1)}, "temperature must not be negative, got -1.0"),
        ({"temperature": jnp.float32(jnp.nan)}, "temperature must not be negative, got nan"),
        (
            {"start": Start(temperature=jnp.asarray([0, 1, -2.0, 1]))},
            "start.temperature must not be negative, got -2.0",
        ),
        ({"start": Start(group=np.asarray([0, 0, 1, 4]))}, r"start.group must be in \[0, 4\), got 4"),
        ({"start": Start(group=np.asarray([0, 0, -1, 1]))}, r"start.group must be in \[0, 4\), got -1"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        (
            {"env": talk()._replace(spec=talk().spec._replace(info=(("played", "float32"),)))},
            r"talk: EnvSpec.info must not use the names \['played'\]",
        ),
    ],
)
def test_what_cannot_be_played_is_refused(change, message):
    options = {"policy": POLICY, "env": talk(), "episodes": 4, "slots": 2, "max_tokens": 8} | change
    policy, env = options.pop("policy"), options.pop("env")
    with pytest.raises(ValueError, match=message):
        rollout(policy, CODEC, env, {}, jax.random.key(0), **options)
