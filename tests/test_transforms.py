"""Turn limits, rewards, mixtures and the content split."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quiz

from agentrl_jax.envs import (
    Environment,
    EnvSpec,
    canonical_params,
    check_env,
    held_out,
    make,
    mixture,
    noisy_reward,
    series,
    thinking,
    turn_limit,
    with_reward,
)
from agentrl_jax.envs.transforms import check_split, is_test
from agentrl_jax.text import format_int, hash_, literal, to_str
from agentrl_jax.types import Text, TimeStep


class Count(NamedTuple):
    count: int = 1000


def _numbers() -> Environment:
    """Shows a number below ``params.count``; any action ends the episode."""

    def reset(key, params):
        number = jax.random.randint(key, (), 0, params.count)
        return number, TimeStep(observation=format_int(number, 16))

    def step(key, state, action, params):
        return state, TimeStep(observation=literal("", 16), reward=1.0, terminated=True)

    return Environment("numbers", "1", EnvSpec(16, 4, 1), Count(), reset, step)


NUMBERS = _numbers()
KEYS = 4096
# Compiling is nearly all the cost of these tests.


def draws(env, params=None, n=KEYS):
    """States and first steps of ``n`` resets."""
    params = canonical_params(env.params if params is None else params)
    return batched_reset(env)(jax.random.split(jax.random.key(5), n), params)


@functools.cache
def batched_reset(env):
    return jax.jit(jax.vmap(env.reset, (0, None)))


# --- turn_limit and with_reward ---------------------------------------------------------------------------------------


def run(env, write, seed=0):
    params, key = canonical_params(env.params), jax.random.key(seed)
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    state, ts = reset(key, params)
    steps = [ts]
    for k in range(env.spec.max_turns):
        action = write if isinstance(write, str) else write(key, state, params)
        action = literal(action, env.spec.max_action) if isinstance(action, str) else action
        state, ts = step(jax.random.fold_in(key, k), state, action, params)
        steps.append(ts)
        if ts.terminated or ts.truncated:
            break
    return steps


def test_turn_limit_cuts_unless_the_task_is_over():
    short = turn_limit(make("probe_delayed"), 2)
    assert short is turn_limit(make("probe_delayed"), turns=2) and short.spec.max_turns == 2
    steps = run(short, short.expert)
    assert [bool(ts.truncated) for ts in steps] == [False, False, True]
    assert not any(ts.terminated for ts in steps)
    full = run(turn_limit(make("probe_delayed"), 3), "1")
    assert bool(full[-1].terminated) and not full[-1].truncated and float(full[-1].reward) == 1


def test_turn_limit_drops_a_restart_at_the_cut_and_keeps_the_extras():
    env = turn_limit(make("probe_restart"), 2)
    assert [bool(ts.restart) for ts in run(env, "1")] == [False, True, False]
    check_env(env, episodes=2)


@pytest.mark.parametrize("turns", [0, 4, 2.0, True])
def test_turn_limit_refuses_other_turns(turns):
    with pytest.raises(ValueError, match=rf"in \[1, 3\], got {turns}"):
        turn_limit(make("probe_delayed"), turns)


def length_reward(before, action, after, timestep):
    return 10.0 * timestep.reward + action.length + 100.0 * (after.turn - before.turn)


def two_parts(before, action, after, timestep):
    return {"length": action.length, "late": after.turn > 1}


def test_with_reward_replaces_the_reward():
    env = with_reward(make("probe_delayed"), length_reward)
    assert env is with_reward(make("probe_delayed"), length_reward)
    assert [float(ts.reward) for ts in run(env, "1")] == [0, 101, 101, 111]


def test_with_reward_adds_parts_to_info_and_keeps_the_reward():
    env = with_reward(make("probe_delayed"), two_parts, parts=("length", "late"))
    steps = run(env, "11")
    assert [float(ts.reward) for ts in steps] == [0, 0, 0, 1]
    assert [float(ts.info["length"]) for ts in steps] == [0, 2, 2, 2]
    assert [float(ts.info["late"]) for ts in steps] == [0, 0, 1, 1]
    assert {x.dtype for x in steps[0].info.values()} == {jnp.float32.dtype}
    check_env(env, episodes=2)


def test_with_reward_may_do_both():
    env = with_reward(make("probe_delayed"), lambda b, a, c, ts: {"part": 2.0, "reward": -1.0}, parts=["part"])
    last = run(env, "1")[-1]
    assert float(last.reward) == -1 and float(last.info["part"]) == 2 and float(last.info["success"]) == 1


def test_with_reward_refuses_wrong_names():
    env = make("probe_delayed")
    for parts in (("success",), ("reward",), ("a", "a")):
        with pytest.raises(ValueError, match=parts[0]):
            with_reward(env, two_parts, parts=parts)
    with pytest.raises(ValueError, match=r"dict with \['length'\], got \['late', 'length'\]"):
        run(with_reward(env, two_parts, parts=("length",)), "1")
    with pytest.raises(ValueError, match=r"dict with \['length'\], got"):
        run(with_reward(env, length_reward, parts=("length",)), "1")


# --- mixture ----------------------------------------------------------------------------------------------------------

MEMBERS = ("probe_transition", "probe_observation", "guess", "probe_truncation")


@functools.cache
def mixed():
    return mixture([make(name) for name in MEMBERS], (3, 1, 0, 4))


def test_mixture_draws_by_traced_weights():
    env = mixed()
    assert env is mixture(tuple(make(name) for name in MEMBERS), [3.0, 1.0, 0.0, 4.0])
    for weights in (env.params.weights, (0.0, 1.0, 1.0, 0.0)):
        _, ts = draws(env, env.params._replace(weights=weights), n=2048)
        share = np.bincount(np.asarray(ts.info["env"]), minlength=4) / 2048
        assert np.abs(share - np.asarray(weights) / sum(weights)).max() < 0.05
        assert not share[np.asarray(weights) == 0].any()


def test_mixture_capacities_and_info_are_those_of_all_members():
    spec = mixed().spec
    assert (spec.max_observation, spec.max_action, spec.max_turns) == (32, 16, 12)
    assert dict(spec.info) == {"env": "int32", "success": "float32", "malformed": "float32"}


def test_a_mixture_plays_each_row_as_its_member_would():
    env = mixture([make("probe_transition"), make("probe_observation"), make("probe_truncation")])
    params = canonical_params(env.params)
    keys = jax.random.split(jax.random.key(2), 24)
    state, first = jax.jit(jax.vmap(env.reset, (0, None)))(keys, params)
    action = jax.vmap(lambda k: literal("1", 2))(keys)
    _, ts = jax.jit(jax.vmap(env.step, (0, 0, 0, None)))(keys, state, action, params)
    picked = np.asarray(first.info["env"])
    assert set(picked) == {0, 1, 2} and (np.asarray(ts.info["env"]) == picked).all()
    seen = [to_str(jax.tree.map(lambda x, r=r: x[r], first.observation)) for r in range(24)]
    after = [to_str(jax.tree.map(lambda x, r=r: x[r], ts.observation)) for r in range(24)]
    for row, member in enumerate(picked):
        assert seen[row] in (("door",), ("0", "1"), ("tick",))[member]
        assert after[row] == ("gold", "", "tick")[member]
        assert float(ts.reward[row]) == (0.0, float(seen[row] == "1"), 1.0)[member]
        assert bool(ts.terminated[row]) == (member == 1)


def test_a_shorter_member_is_cut_at_its_own_limit():
    steps = run(mixture([make("probe_truncation"), make("guess")], (1, 0)), "1")
    assert len(steps) == 5 and bool(steps[-1].truncated)


def test_guards_stay_branches_under_vmap():
    env = mixed()
    params = canonical_params(env.params)
    keys = jax.random.split(jax.random.key(0), 3)
    state, _ = jax.eval_shape(jax.vmap(env.reset, (0, None)), keys, params)
    action = jax.vmap(lambda k: literal("1", env.spec.max_action))(keys)
    jaxpr = jax.make_jaxpr(jax.vmap(env.step, (0, 0, 0, None)))(keys, state, action, params)
    assert sum(eqn.primitive.name == "cond" for eqn in jaxpr.eqns) == len(MEMBERS)


def test_mixture_conforms_with_and_without_experts_and_anchors():
    report = check_env(mixed(), episodes=8)
    assert report.expert is not None and mixed().anchor is not None and mixed().privileged is not None
    plain = mixture([make("probe_delayed"), make("probe_delayed")._replace(expert=None)])
    assert plain.expert is None and plain.anchor is None and plain.privileged is None


def test_the_anchor_of_a_mixture_is_the_member_s():
    env = mixture([make("guess"), make("probe_transition")])
    states, steps = draws(env, n=8)
    anchors = jax.jit(jax.vmap(env.anchor))(states)
    guessed = jax.jit(jax.vmap(make("guess").anchor))(states.members[0])
    hashed = jax.jit(jax.vmap(hash_))(steps.observation)
    picked = np.asarray(steps.info["env"])
    assert set(picked) == {0, 1}
    assert (np.asarray(anchors) == np.where(picked == 0, guessed, hashed)).all()


def test_mixture_refuses_what_cannot_be_mixed():
    a, b = make("probe_delayed"), make("guess")
    spec = a.spec
    cases = [
        (([], None), "one weight for each"),
        (([a, b], [1.0]), "one weight for each"),
        (([a, b], [1.0, -1.0]), "not negative"),
        (([a, b], [0.0, 0.0]), "not all 0"),
        (([a, b], [1.0, float("nan")]), "finite"),
        (([a, b._replace(spec=b.spec._replace(roles=2))], None), "disagree on roles"),
        (([a, b._replace(spec=b.spec._replace(cut_action="end"))], None), "disagree on cut_action"),
        (([a, mixture([a, b])], None), "'env'"),
        (([a, a._replace(spec=spec._replace(info=(("success", "int32"),)))], None), "'success'"),
        (([x._replace(spec=x.spec._replace(cut_action="end")) for x in (a, b)], None), "share max_action"),
    ]
    for (envs, weights), message in cases:
        with pytest.raises(ValueError, match=message):
            mixture(envs, weights)


# --- held_out ---------------------------------------------------------------------------------------------------------


def numpy_first(env, n=KEYS):
    _, ts = draws(env, n=n)
    data, length = np.asarray(ts.observation.data), np.asarray(ts.observation.length)
    return [d[:k].tobytes() for d, k in zip(data, length, strict=True)], np.asarray(ts.info["split_miss"])


def test_the_sides_are_disjoint_and_together_everything():
    fraction = 0.1
    train, miss_train = numpy_first(held_out(NUMBERS, "train", fraction), 8192)
    test, miss_test = numpy_first(held_out(NUMBERS, "test", fraction), 8192)
    assert not set(train) & set(test) and not miss_train.any() and not miss_test.any()
    assert len(set(train) | set(test)) > 980
    assert abs(len(set(test)) / 1000 - fraction) < 0.05


def test_a_split_draw_does_not_depend_on_the_batch():
    env = held_out(NUMBERS, "test")
    params = canonical_params(env.params)
    keys = jax.random.split(jax.random.key(5), 64)
    state, _ = draws(env, n=64)
    alone = [int(jax.jit(env.reset)(key, params)[0].inner) for key in keys[:5]]
    assert alone == np.asarray(state.inner)[:5].tolist()


def test_a_side_without_tasks_says_so_in_every_turn():
    env = make("probe_truncation")
    empty = "train" if bool(is_test(env.reset(jax.random.key(0), env.params)[1].observation, 0.1)) else "test"
    steps = run(held_out(env, empty), "1")
    assert [float(ts.info["split_miss"]) for ts in steps] == [1.0] * 5
    full = "test" if empty == "train" else "train"
    assert float(run(held_out(env, full), "1")[0].info["split_miss"]) == 0
    with pytest.raises(ValueError, match=r"1 tasks are different.*both need one"):
        check_split(env)


def test_check_split_counts_both_sides():
    train, test = check_split(NUMBERS, 0.2)
    assert 960 < train + test <= 1000 and abs(test / (train + test) - 0.2) < 0.05


def test_held_out_composes_and_conforms():
    env = held_out(mixture([make("probe_observation"), make("probe_transition")]), "train", 0.3)
    assert env is held_out(mixture([make("probe_observation"), make("probe_transition")]), fraction=0.3)
    assert check_env(env, episodes=4).expert == 1


@pytest.mark.parametrize(
    ("args", "message"), [(("dev",), "'dev'"), (("test", 0.0), "got 0.0"), (("test", 1.0), "got 1.0")]
)
def test_held_out_refuses_other_splits(args, message):
    with pytest.raises(ValueError, match=message):
        held_out(NUMBERS, *args)
    with pytest.raises(ValueError, match="split already"):
        held_out(held_out(NUMBERS), "test")


def test_a_noisy_reward_hides_the_exact_one_and_keeps_it():
    env, noisy = quiz.ENV, noisy_reward(quiz.ENV, 0.5)
    assert noisy is noisy_reward(quiz.ENV, 0.5) and noisy.name == "noisy_reward(quiz,0.5)"
    state, _ = noisy.reset(jax.random.key(0), ())
    answer = Text(jnp.asarray([state[0], 0], jnp.uint8), jnp.int32(1))
    call = Text(jnp.asarray([ord("c"), 0], jnp.uint8), jnp.int32(1))
    step = jax.jit(jax.vmap(lambda key, action: noisy.step(key, state, action, ())[1], (0, None)))
    keys = jax.random.split(jax.random.key(1), 2000)
    last, first = step(keys, answer), step(keys, call)
    assert (np.asarray(last.info["exact_reward"]) == 1).all() and last.terminated.all()
    np.testing.assert_allclose([np.mean(last.reward), np.std(last.reward)], [1.0, 0.5], atol=0.05)
    # An estimate is of a whole answer: nothing is paid, and no noise made, on the way.
    assert not np.asarray(first.reward).any() and not np.asarray(first.terminated).any()
    assert float(env.step(keys[0], state, answer, ())[1].reward) == 1
    with pytest.raises(ValueError, match="std must be at least 0"):
        noisy_reward(quiz.ENV, -1.0)
    with pytest.raises(ValueError, match="its info has exact_reward already"):
        noisy_reward(noisy)


# --- series and thinking ----------------------------------------------------------------------------------------------


def say(*actions):
    """A writer of these texts, one a turn."""
    left = list(actions)
    return lambda key, state, params: literal(left.pop(0), 8)


def letters(env, seed=0):
    """The letters that the tasks of a series of quizzes ask for."""
    state, _ = env.reset(jax.random.key(seed), ())
    return [chr(x) for x in np.asarray(state.tasks[0][0])]


def wrong(letter):
    return "b" if letter == "a" else "a"


def test_a_series_shows_one_task_after_another_and_pays_each_its_share():
    env = series(quiz.ENV, 3)
    a, b, c = letters(env)
    steps = run(env, say("c", a, wrong(b), c))
    assert [to_str(ts.observation) for ts in steps[:4]] == ["?", a, "!\n?", "!\n?"]
    np.testing.assert_allclose([ts.reward for ts in steps[1:]], [0, 1 / 3, 0, 1 / 3], atol=1e-6)
    assert [float(ts.info["solved"]) for ts in steps[1:]] == [0, 1, 0, 1]
    assert [float(ts.info["success"]) for ts in steps[1:]] == [0, 0, 0, 0]
    assert [bool(ts.terminated) for ts in steps[1:]] == [False, False, False, True]


@pytest.mark.parametrize("paid_at_end, rewards", [(False, [0.5, 0.5]), (True, [0.0, 1.0])])
def test_a_series_is_solved_when_every_task_is(paid_at_end, rewards):
    env = series(quiz.ENV, 2, paid_at_end=paid_at_end)
    steps = run(env, say(*letters(env)))
    assert [float(ts.reward) for ts in steps[1:]] == rewards
    assert [float(ts.info["success"]) for ts in steps[1:]] == [0.0, 1.0]


def test_a_task_that_runs_out_of_turns_is_over_and_the_last_one_s_cut_is_the_series_own():
    env = series(quiz.ENV, 2)
    steps = run(env, say(*"xxxxxx"))
    assert len(steps) == 1 + 2 * quiz.TURNS == 1 + env.spec.max_turns
    assert [bool(ts.truncated) for ts in steps[1:]] == [False] * 5 + [True] and not steps[-1].terminated
    assert int(env.reset(jax.random.key(0), ())[0].index) == 0

    endless = quiz.ENV._replace(name="endless", step=lambda *args: (args[1], TimeStep(observation=quiz._text(33))))
    assert len(run(series(endless, 2), "x")) == 1 + 2 * quiz.TURNS, (
        "the limit of the spec ends what ends nothing itself"
    )


def test_the_tasks_of_a_series_follow_from_the_reset_alone():
    env = series(quiz.ENV, 5)
    found = {"".join(letters(env, seed)) for seed in range(20)}
    assert len(found) > 8 and letters(env, 3) == letters(env, 3)


def test_the_anchor_of_a_series_knows_the_place_but_not_the_way():
    env = series(quiz.ENV, 2)
    state, _ = env.reset(jax.random.key(1), ())
    first, _ = letters(env, 1)
    step = functools.partial(env.step, jax.random.key(0))
    right, fails = step(state, literal(first, 2), ())[0], step(state, literal(wrong(first), 2), ())[0]
    assert env.anchor(right) == env.anchor(fails) != env.anchor(state)


def test_series_conform():
    assert check_env(series(quiz.ENV, 3)).expert == 1.0
    assert check_env(thinking(series(quiz.ENV, 2, paid_at_end=True), 3)).expert == 1.0


@pytest.mark.parametrize(
    "env, tasks, message",
    [
        (quiz.ENV, 1, "at least 2, got 1"),
        (mixture([make("guess"), make("probe_delayed")]), 2, "no mixture"),
        (series(quiz.ENV, 2), 2, "no part named solved"),
        (quiz.ENV._replace(spec=quiz.ENV.spec._replace(info=())), 2, "needs success"),
    ],
)
def test_series_refuses_what_it_cannot_play(env, tasks, message):
    with pytest.raises(ValueError, match=message):
        series(env, tasks)


def test_thoughts_have_no_effect_and_the_teacher_thinks_at_every_length():
    env, bare = thinking(quiz.ENV, 3), quiz.ENV
    state, _ = env.reset(jax.random.key(0), ())
    for text in ("c", "...\nc", "\nc\n"):
        after, ts = env.step(jax.random.key(1), state, literal(text, env.spec.max_action), ())
        expected = bare.step(jax.random.key(1), state, literal("c", bare.spec.max_action), ())
        jax.tree.map(np.testing.assert_array_equal, (after, ts), expected)
    said = jax.vmap(env.expert, (0, None, None))(jax.random.split(jax.random.key(2), 64), state, ())
    texts = {bytes(np.asarray(d[:n])).decode() for d, n in zip(said.data, said.length, strict=True)}
    assert texts == {"c", ".\nc", "..\nc", "...\nc"}


@pytest.mark.parametrize("most", [0, True, 2.0])
def test_thinking_refuses_other_lengths(most):
    with pytest.raises(ValueError, match="at least 1"):
        thinking(quiz.ENV, most)
