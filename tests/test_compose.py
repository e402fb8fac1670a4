"""Composition by keyword: what fits together, what is refused and why, and presets with their options changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import trajectory
from conversations import conversations, tools_of
from quiz import ENV, fluent
from tiny import CODEC, POLICY

from agentrl_jax import TrainConfig, UpdateConfig, algorithms, make_hyper, make_init, make_step, parts, train
from agentrl_jax.algorithm import Shape
from agentrl_jax.algorithms import compose, make
from agentrl_jax.algorithms.finishing import FINISH

CONFIG = TrainConfig(episodes=8, group_size=4, slots=8, max_tokens=20)


def test_choices_are_what_compose_takes():
    table = algorithms.choices()
    for name in table["advantage"]:
        needed = {"subtract_baseline": "greedy_baseline", "vine_advantage": "vine", "tree_advantage": "tree"}
        more = {"tree_advantage": {"roots": 2}, "ones": {"filters": "correct"}}.get(name, {})
        assert compose(advantage=name, collect=needed.get(name), **more).name == "custom"
    for name in table["shaping"]:
        more = {"collect": "tree", "roots": 2} if name == "shared_prefix" else {}
        assert "group" in compose(shaping=name, **more).needs
    for name in table["correction"]:
        assert "correction_high" in compose(correction=name).hyper
    for name in table["kl"]:
        assert compose(kl=name, kl_in="reward").hyper["kl_coef"] == 0.01
        assert name == "k1" or compose(kl=name).hyper["kl_coef"] == 0.01
    assert set(table["finish"]) == set(FINISH)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"advantage": "gea"}, "Unknown advantage 'gea'. Known: group, own_group"),
        ({"collect": "often"}, "Unknown collect 'often'. Known: greedy_baseline, refill"),
        ({"filters": ("varied", "x")}, "Unknown filters 'x'. Known: varied, complete"),
        ({"advantage": ("group", "gae")}, "advantage takes one name, got group, gae"),
        ({"advantage": None}, "advantage needs a name: group"),
        ({"ratio": "none"}, "there is no ratio to clip"),
        ({"kl": "k9"}, "Unknown kl 'k9'. Known: k1"),
        ({"kl_in": "sky"}, "Unknown kl_in 'sky'. Known: loss, reward"),
        ({"kl_coef": -1.0}, "kl_coef must not be negative, got -1"),
        ({"imitation": "luffy"}, "it needs collect='mixed_expert'"),
        ({"imitation": "x"}, "Unknown imitation 'x'. Known: luffy"),
        ({"advantage": "subtract_baseline"}, "subtract_baseline reads what greedy_baseline leaves: it needs collect="),
        ({"advantage": "vine_advantage"}, "it needs collect='vine'"),
        ({"shaping": "shared_prefix"}, "it needs collect='tree'"),
        ({"ratio": "sequence", "aggregation": "token-sum"}, "which token-sum would multiply by its length"),
        ({"ratio": "product", "aggregation": "seq-mean-token-sum"}, "take seq-mean-token-mean or token-mean"),
        ({"tokens": "kl_cov"}, "two halves of one method"),
        ({"clip": "kl-cov"}, "two halves of one method"),
        ({"ratio": "none", "clip": "none", "correction": "tis"}, "has nothing to correct"),
        ({"correction": "x"}, "Unknown correction 'x'"),
        ({"finish": "reset_reference"}, "reset_reference needs a divergence in the loss"),
        ({"finish": "adapt_kl"}, "adapt_kl needs a divergence"),
        ({"finish": "anneal_imitation"}, "anneal_imitation needs an imitation that is mixed in"),
        ({"finish": "x"}, "Unknown finish 'x'. Known: reset_reference"),
        ({"advantage": "gae", "replay": "replay", "capacity": 8}, "replay does not go with a critic's advantage"),
        (
            {"shaping": "ktae_shaped", "collect": "difficulty_rolls"},
            "larger than group_size, up to which ktae_shaped counts",
        ),
        ({"lambda_": 0.9}, r"custom has no option \['lambda_'\]; it has: "),
        ({"eps_low": "x"}, "eps_low must be a number, got 'x'"),
        ({"aggregation": "mean"}, "Unknown aggregation mode 'mean'"),
        ({"collect": "tree"}, "custom: tree needs roots="),
        ({"replay": "replay"}, "custom: replay needs capacity="),
        ({"kl": "k1"}, "k1 in the loss has an expected gradient of 0"),
        ({"advantage": "ones"}, "it needs a filter, such as best_of_group"),
        ({"advantage": "ones", "filters": "correct", "shaping": "whiten"}, "whitening makes equal advantages 0"),
        ({"ratio": "sequence", "tokens": "top_entropy", "aggregation": "seq-mean-token-mean"}, "silences tokens"),
        ({"ratio": "sequence", "advantage": "gigpo"}, "would average that of gigpo away"),
        ({"advantage": "gigpo", "shaping": "aspo_shaped"}, "would flatten that of gigpo"),
        ({"advantage": "gdpo", "kl": "k1", "kl_in": "reward"}, "kl_penalty would be ignored or distort it"),
        ({"advantage": "pass_at_k", "reward": "step_reward"}, "step_reward would be ignored or distort it"),
        ({"shaping": "ktae_shaped", "filters": "policy_filtration"}, "policy_filtration makes groups larger"),
        ({"advantage": "pass_at_k", "collect": "difficulty_rolls"}, "makes groups smaller than k"),
        (
            {"collect": "tree", "roots": 2, "advantage": "tree_advantage", "filters": "policy_filtration"},
            "moves the rows",
        ),
        ({"replay": "replay", "capacity": 8, "shaping": "whiten"}, "nothing would be replaced"),
        ({"replay": "replay", "capacity": 8, "ratio": "none", "clip": "none"}, "need a ratio to correct them"),
        ({"replay": "replay", "capacity": 8, "perception": True}, "no masked scores"),
        ({"advantage": "vtrace", "correction": "tis"}, "would do so twice"),
        ({"collect": "vine"}, "vine rolls what nothing reads: choose advantage='vine_advantage'"),
        ({"collect": "greedy_baseline"}, "choose advantage='subtract_baseline'"),
        ({"collect": "mixed_expert"}, "only shifts the baseline"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(options, message):
    with pytest.raises(ValueError, match=message):
        compose(**options)


def test_an_option_goes_with_its_ingredient():
    assert make("grpo", clip="sapo").hyper.keys() == {"tau_pos", "tau_neg", "entropy_coef"}
    # DAPO's eps_high is the clip's: with another clip nothing reads it, and nobody asked for it.
    assert "eps_high" not in make("dapo", clip="sapo").hyper
    with pytest.raises(ValueError, match=r"dapo has no option \['eps_high'\]"):
        make("dapo", clip="sapo", eps_high=0.3)
    assert make("dapo", eps_high=0.3).hyper["eps_high"] == 0.3
    assert "critic" in make("grpo", advantage="gae").needs and make("grpo", advantage="gae").hyper["lambda_"] == 0.95
    assert make("ppo", advantage="group", kl_coef=0.1).needs == {"group", "reference"}


def test_names_may_be_one_string():
    a, b = make("grpo", filters="varied,complete"), make("grpo", filters=("varied", "complete"))
    key = jax.random.key(0)
    assert a.init(key, Shape(8, 4, 20, 3)).keys() == b.init(key, Shape(8, 4, 20, 3)).keys() >= {"varied", "complete"}
    assert make("dapo", collect="none", filters="none", reward="none").needs == {"group"}
    assert make("dr_grpo", aggregation="token-mean").hyper == make("grpo").hyper


def test_a_preset_keeps_nothing_between_steps_but_what_its_parts_do():
    shape, key = Shape(8, 4, 20, 3), jax.random.key(0)
    kept = {name for name in algorithms.names() if jax.tree.leaves(make(name).init(key, shape))}
    assert kept == {
        "reinforce", "greso", "srpo", "ghpo", "skywork_ssb", "beta_dpo",
    }  # fmt: skip
    assert not jax.tree.leaves(make("reinforce", baseline="none").init(key, shape))


def test_parts_refuse_to_share_a_name_or_a_number():
    one = parts.Part("a", hyper={"x": 1.0})
    roll = parts.Part("r", collect=lambda *a: a)
    with pytest.raises(ValueError, match="two parts are called 'a'"):
        parts.join([one, one])
    with pytest.raises(ValueError, match="'r' and 's' both decide what is rolled: choose one"):
        parts.join([roll, roll._replace(name="s")])
    with pytest.raises(ValueError, match=r"'b' reads x = 2\.0, another part x = 1\.0"):
        parts.join([one, one._replace(name="b", hyper={"x": 2.0})])


def test_a_part_has_its_own_memory_and_key():
    seen = []

    def stage(memory, batch, tools, hyper, key):
        seen.append(key)
        return memory + 1, batch, {}

    counter = parts.Part("a", stage, init=lambda key, shape: jnp.zeros(()))
    joined = parts.join([counter, parts.Part("idle"), counter._replace(name="b")])
    b = conversations(0)
    memory = joined.init(jax.random.key(0), Shape(8, 3, 24, 4))
    memory, out, _ = joined.prepare(memory, b.traj, tools_of(b), {}, jax.random.key(1))
    assert memory == {"a": 1, "idle": (), "b": 1} and seen[0] != seen[1]
    np.testing.assert_array_equal(out.mask, b.traj.mask & ~b.traj.expert)


def test_a_note_is_a_number_an_episode():
    traj = trajectory(np.ones((4, 3)), segments=2)
    traj = parts.note(traj, 2, score=jnp.asarray([3.0, 5.0]))
    np.testing.assert_array_equal(parts.noted(traj, "score", 2), [3, 5])
    traj = traj._replace(steps=traj.steps | {"cut": jnp.zeros((4, 2), bool)})
    assert float(train.rollout_metrics(traj, 2)["score"][0]) == 8


@pytest.mark.parametrize("need, config, message", [
    ("parts:cost", CONFIG, r"needs the parts \['cost'\] in the environment's info; quiz reports: success, tool_calls"),
    ("one_segment", CONFIG._replace(segments=2), "does not play contexts that restart: segments must be 1, got 2"),
    ("group>=6", CONFIG, "draws 6 of a group: group_size must be at least 6, got 4"),
])  # fmt: skip
def test_needs_are_checked_before_anything_compiles(need, config, message):
    algorithm = make("grpo")._replace(needs=frozenset({need}))
    with pytest.raises(ValueError, match=message):
        make_init(POLICY, CODEC, ENV, algorithm, config)


def test_a_policy_filter_refuses_an_exact_reward():
    with pytest.raises(ValueError, match=r"pf_ppo needs the parts \['exact_reward'\]"):
        make_step(POLICY, CODEC, ENV, make("pf_ppo"), CONFIG)


# What follows the update


def stepped(algorithm, state=None, **numbers):
    hyper = make_hyper(algorithm, ENV, learning_rate=0.1, **numbers)
    config = CONFIG._replace(update=UpdateConfig(optimizer="adam"))
    if state is None:
        state = make_init(POLICY, CODEC, ENV, algorithm, config)(jax.random.key(3), hyper, fluent())
    return jax.jit(make_step(POLICY, CODEC, ENV, algorithm, config)), state


def test_a_refused_step_steers_nothing():
    step, state = stepped(make("grpo", kl="k3", finish="adapt_kl,adapt_entropy"))
    broken = state._replace(hyper=state.hyper._replace(learning_rate=jnp.float32(jnp.nan)))
    after, _ = step(broken)
    assert int(after.skipped) == 1 and same(after.hyper.algorithm, state.hyper.algorithm)


def test_nothing_to_learn_from_is_no_update():
    """Every group alike, all dropped: momentum and decay must not move the parameters, and nothing was refused."""
    silent = fluent() | {"bias": jnp.full(CODEC.vocab_size, -9.0).at[CODEC.end_action].set(9.0)}
    algorithm = make("dapo", reward="none")
    step, state = stepped(algorithm, weight_decay=0.1)
    state = state._replace(params={"policy": silent}, opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))
    after, metrics = step(state)
    assert float(metrics["loss_tokens"][0]) == 0 == int(after.updates) == int(after.skipped)
    assert same(after.params, state.params) and same(after.opt_state, state.opt_state) and int(after.step) == 1


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_the_reference_and_the_optimiser_are_reset():
    algorithm = make("grpo", kl="k3", finish="reset_reference")
    step, state = stepped(algorithm, reset_every=2)
    first, _ = step(state)
    assert not same(first.params["reference"], first.params["policy"]) and same(
        first.params["reference"], state.params["policy"]
    )
    second, _ = step(first)
    assert same(second.params["reference"], second.params["policy"])
    assert int(second.opt_state.count) == 0 and not any(np.any(x) for x in jax.tree.leaves(second.opt_state.mu))
    _, metrics = step(second)
    assert float(metrics["kl"][0]) < 1e-4


def test_coefficients_are_steered():
    step, state = stepped(make("chord"), mu_decay=2)
    first, _ = step(state)
    second, _ = step(first)
    np.testing.assert_allclose([s.hyper.algorithm["mu"] for s in (state, first, second)], [0.9, 0.475, 0.05], atol=1e-6)
    step, state = stepped(
        make("grpo", kl="k3", finish="adapt_kl,adapt_entropy"), entropy_target=99.0, kl_target=1e-9, kl_horizon=100
    )
    first, _ = step(state)
    second, _ = step(first)
    np.testing.assert_allclose(second.hyper.algorithm["entropy_coef"], 0.01, rtol=1e-5)
    # At first the policy is its own reference: no divergence, which is below the target.
    coef = [float(s.hyper.algorithm["kl_coef"]) for s in (state, first, second)]
    np.testing.assert_allclose([coef[1] / coef[0], coef[2] / coef[1]], [1 - 0.2 * 0.08, 1 + 0.2 * 0.08], rtol=1e-5)
