"""Composition by keyword: what fits together, what is refused and why, and presets with their options changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import trajectory
from conversations import TURNS, conversations, joined, run, split, tools_of, with_gap
from quiz import ENV, fluent
from tiny import CODEC, POLICY
from tiny import params as tiny_params

from agentrl_jax import (
    TrainConfig,
    UpdateConfig,
    algorithms,
    credit,
    make_hyper,
    make_init,
    make_step,
    metrics,
    parts,
    scoring,
    train,
)
from agentrl_jax.algorithm import Shape
from agentrl_jax.algorithms import compose, make, prefer
from agentrl_jax.algorithms.finishing import FINISH
from agentrl_jax.types import Score

CONFIG = TrainConfig(episodes=8, group_size=4, slots=8, max_tokens=20)


def test_choices_are_what_compose_takes():
    table = algorithms.choices()
    for name in table["advantage"]:
        needed = {"subtract_baseline": "greedy_baseline", "vine_advantage": "vine", "tree_advantage": "tree"}
        more = {
            "tree_advantage": {"roots": 2}, "ones": {"filters": "correct"},
            "tag_relative": {"tag": "tool_calls", "part": "malformed"},
        }.get(name, {})  # fmt: skip
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
        ({"lambda_critic": 1.0}, r"custom has no option \['lambda_critic'\]; it has: "),
        ({"advantage": "vapo_gae", "lambda_critic": 1.0}, r"custom has no option \['lambda_critic'\]; it has: "),
        ({"advantage": "gae", "lambda_critic": 1.5}, r"lambda_critic must be in \[0, 1\], got 1.5"),
        ({"advantage": "gae", "lambda_critic": "far"}, "lambda_critic must be a number, got 'far'"),
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
        ({"veto": True}, "veto is about the weights of a correction: choose correction='tis'"),
        ({"normalise_weights": True}, "normalise_weights is about the weights of a correction"),
        ({"correction": "tis", "veto": "yes"}, "custom: veto must be of type bool, got 'yes'"),
        ({"correction": "tis", "veto": True, "veto_floor": -1.0}, "veto_floor must not be negative, got -1"),
        ({"correction": "tis", "veto_floor": 0.1}, r"custom has no option \['veto_floor'\]"),
        ({"offpolicy_mask": True, "ratio": "none", "clip": "none"}, "offpolicy_mask has nothing to silence"),
        ({"offpolicy_mask": True, "advantage": "best_gap"}, "and those of best_gap never are"),
        ({"offpolicy_mask": 1}, "custom: offpolicy_mask must be of type bool, got 1"),
        ({"kl_corrected": True}, "a divergence in the loss: choose kl='k3'"),
        ({"kl_corrected": True, "kl": "k1", "kl_in": "reward"}, "before the first update, where the ratio is 1"),
        (
            {"kl_corrected": True, "kl": "k3", "kl_coef": 0.0},
            "kl_corrected is about a divergence, and kl_coef=0 leaves",
        ),
        ({"finish": "adapt_kl", "kl": "k3", "kl_coef": 0}, "adapt_kl is about a divergence, and kl_coef=0 leaves none"),
        (
            {"finish": "reset_reference", "kl": "k3", "kl_coef": 0.0},
            "reset_reference is about a divergence, and kl_coef",
        ),
        ({"kl": "k9", "kl_coef": 0.0}, "Unknown kl 'k9'. Known: k1"),
        ({"kl_coef": None}, "kl_coef must be a number, got None"),
        ({"kl_corrected": "no", "kl": "k3"}, "custom: kl_corrected must be of type bool, got 'no'"),
        ({"reward": "running_scale"}, "and group by a deviation of its own: nothing would change"),
        ({"reward": "running_scale", "advantage": "gigpo", "scale": "std"}, "and gigpo by a deviation of its own"),
        ({"reward": "running_scale", "advantage": "returns", "shaping": "whiten"}, "and whiten by a deviation"),
        (
            {"reward": "running_scale", "advantage": "subtract_baseline", "collect": "greedy_baseline"},
            "the greedy episode's return, which it subtracts, is not scaled",
        ),
        ({"reward": "running_scale", "advantage": "pass_at_k"}, "running_scale would be ignored or distort it"),
        ({"advantage": "ones", "filters": "not_all_correct"}, "it needs a filter, such as best_of_group"),
        ({"advantage": "tag_relative", "part": "malformed"}, "custom: tag_relative needs tag="),
        (
            {"advantage": "tag_relative", "tag": "tool_calls", "part": "malformed", "ratio": "sequence"},
            "would average that of tag_relative away",
        ),
        ({"advantage": "optimal_token", "shaping": "entropy_scaled"}, "would flatten that of optimal_token"),
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


def test_a_lambda_of_the_critic_is_a_number_of_the_algorithm():
    """Traced like any other, so that it can be swept; without it there is none."""
    vc = make("ppo", lambda_critic=1)
    assert vc.hyper["lambda_critic"] == 1 and vc.hyper["lambda_"] == 0.95
    assert make_hyper(vc, ENV, lambda_critic=0.9).algorithm["lambda_critic"] == np.float32(0.9)
    plain = make("ppo", lambda_critic=None)
    assert plain.hyper == make("ppo").hyper == {k: v for k, v in vc.hyper.items() if k != "lambda_critic"}


def test_a_scale_is_let_in_where_it_changes_something():
    for options in (
        {"advantage": "group", "scale": "none"},
        {"advantage": "gae", "shaping": "whiten"},
        {"advantage": "group", "kl": "k1", "kl_in": "reward"},
        {"advantage": "group", "reward": ("running_scale", "malformed_penalty")},
    ):
        assert "group" in compose(**{"reward": "running_scale", **options}).needs or options["advantage"] == "gae"


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


# What a keyword does to the numbers


def objective(algorithm, b, **numbers):
    """``logp -> loss`` of a weighed batch, and its metrics."""
    hyper = {k: jnp.float32(v) for k, v in (algorithm.hyper | numbers).items()}
    weighed = algorithm.weigh(b, hyper, 1)

    def loss(logp):
        zero = jnp.zeros_like(logp)
        return algorithm.loss({"policy": Score(logp, zero, zero, b.bootstrap)}, weighed, hyper)

    return loss


def drifted(b, seed=0):
    return jnp.minimum(b.traj.logp + 0.5 * jax.random.normal(jax.random.key(seed), (b.mask.shape[0], 1)), -1e-3)


def test_sequences_that_have_drifted_are_silent_and_still_count():
    b = conversations(11, expert=(2,))
    b = b._replace(mask=b.traj.mask & ~b.traj.expert)
    algorithm = compose(clip="none", offpolicy_mask=True)
    assert algorithm.hyper["offpolicy_delta"] == 0.5 and "one_segment" in algorithm.needs
    logp, mask = drifted(b), np.asarray(b.mask)
    loss = objective(algorithm, b, offpolicy_delta=0.1)
    (found, seen), grad = jax.value_and_grad(loss, has_aux=True)(logp)
    p, old, sampled, adv = (np.asarray(x, np.float64) for x in (logp, b.logp_old, b.traj.logp, b.adv))
    total, silent = 0.0, np.zeros(8, bool)
    for i, on in enumerate(mask):
        if not on.any():
            continue
        silent[i] = adv[i, on].mean() < 0 and (sampled - p)[i, on].mean() > 0.1
        total += 0.0 if silent[i] else -(adv[i, on] * np.exp((p - old)[i, on])).sum()
    assert 0 < silent.sum() < 7
    np.testing.assert_allclose(found, total / mask.sum(), rtol=1e-5)
    np.testing.assert_array_equal(np.abs(np.asarray(grad)).sum(1) > 0, ~silent & mask.any(1))
    np.testing.assert_allclose(seen["kept_offpolicy"], [7 - silent.sum(), 7])
    plain = objective(compose(clip="none"), b)
    np.testing.assert_allclose(objective(algorithm, b, offpolicy_delta=99.0)(logp)[0], plain(logp)[0], rtol=1e-6)


@pytest.mark.parametrize("kl", ["k1", "k3"])
def test_a_corrected_divergence_has_the_gradient_of_the_divergence(kl):
    """``r k`` with ``r = pi / pi_old``: of k3 the gradient is ``r d``, of k1 ``r (d + 1)``; ``d = log pi / ref``."""
    b = conversations(12)
    b = b._replace(adv=jnp.zeros_like(b.adv))
    algorithm = compose(clip="none", kl=kl, kl_coef=1.0, kl_corrected=True)
    logp, mask = drifted(b), np.asarray(b.mask)
    found, grad = jax.value_and_grad(lambda x: objective(algorithm, b)(x)[0])(logp)
    p, old, ref = (np.asarray(x, np.float64) for x in (logp, b.logp_old, b.extra["logp_ref"]))
    ratio, d = np.exp(p - old), p - ref
    value = {"k1": d, "k3": np.exp(-d) - 1 + d}[kl]
    slope = {"k1": d + 1, "k3": d}[kl]
    np.testing.assert_allclose(found, (ratio * value)[mask].mean(), rtol=1e-5)
    np.testing.assert_allclose(grad, np.where(mask, ratio * slope / mask.sum(), 0), atol=1e-6)
    if kl == "k3":
        plain = objective(compose(clip="none", kl=kl, kl_coef=1.0), b)
        np.testing.assert_allclose(plain(logp)[0], value[mask].mean(), rtol=1e-5)


def test_the_scale_of_rewards_is_remembered_and_spares_the_penalty():
    """Returns to go of ``r / std - kl_coef k1``, the deviation over the episodes of both steps."""
    first, second = conversations(13), conversations(14)
    algorithm = compose(advantage="returns", baseline="none", reward="running_scale", kl="k1", kl_in="reward")
    hyper = {k: jnp.float32(v) for k, v in algorithm.hyper.items()}
    memory = algorithm.init(jax.random.key(0), Shape(8, 3, 24, TURNS))
    seen = []
    for b in (first, second):

        def score(view, of, b=b):
            logp = {"policy": b.logp_old, "reference": b.extra["logp_ref"]}[view.model]
            return Score(logp, logp, logp, of.bootstrap)

        seen += list(np.asarray(b.traj.reward, np.float64).sum(1))
        memory, out, _ = algorithm.prepare(memory, b.traj, tools_of(b, score=score), hyper, jax.random.key(1))
        mask = np.asarray(b.mask)
        penalty = np.where(mask, np.asarray(b.logp_old - b.extra["logp_ref"]), 0)
        paid = np.asarray(b.traj.reward) / (np.std(seen, ddof=1) + 1e-8) - 0.01 * penalty
        expected = np.where(mask, np.cumsum(paid[:, ::-1], 1)[:, ::-1], 0)
        np.testing.assert_allclose(np.where(mask, out.adv, 0), expected, atol=1e-5)
    assert float(memory["running_scale"].count) == 16


@pytest.mark.parametrize("imitation", ["luffy", "rl-plus", "chord", "chord-phi"])
def test_what_is_said_of_the_policy_counts_its_own_words(imitation):
    """The expert's, whatever their numbers, reach no metric that describes or steers the policy."""
    b = conversations(15, expert=(2, 6))
    b = b._replace(extra=b.extra | {"logp_masked": b.extra["logp_ref"]})
    algorithm = compose(
        collect="mixed_expert", imitation=imitation, kl="k3", perception=True, finish="adapt_kl,adapt_entropy"
    )
    hyper = {k: jnp.float32(v) for k, v in algorithm.hyper.items()}
    weighed, expert = algorithm.weigh(b, hyper, 1), np.asarray(b.traj.expert)
    own, logp = np.asarray(b.mask) & ~expert, np.asarray(drifted(b, 1), np.float64)

    def seen(logp, entropy):
        score = Score(
            jnp.asarray(logp, jnp.float32), jnp.asarray(entropy, jnp.float32), jnp.zeros_like(b.adv), b.bootstrap
        )
        return algorithm.loss({"policy": score}, weighed, hyper)[1]

    entropy = np.asarray(b.extra["entropy"])
    found = seen(logp, entropy)
    other = seen(np.where(expert, logp - 3.0, logp), np.where(expert, 99.0, entropy))
    d = logp - np.asarray(b.extra["logp_ref"])
    expected = {"entropy": entropy, "kl": np.exp(-d) - 1 + d, "perception": np.exp(-d) - 1 + d}
    old = np.exp(logp - np.asarray(b.logp_old))
    expected["kl_old"] = old - 1 - np.log(old)
    adv = np.asarray(b.adv)
    if "clip_high" in found:
        expected |= {"clip_high": (old > 1.2) & (adv > 0), "clip_low": (old < 0.8) & (adv < 0)}
    for name, each in expected.items():
        np.testing.assert_allclose(found[name], (each[own].sum(), own.sum()), rtol=1e-4, atol=1e-5, err_msg=name)
        np.testing.assert_array_equal(other[name], found[name], err_msg=name)
    assert own.sum() < np.asarray(b.mask).sum() and "clip_high" in found
    # Cloning has no other words than the expert's: there they are what is described.
    clone = make("behavior_cloning")
    score = Score(*(jnp.asarray(x, jnp.float32) for x in (logp, entropy)), jnp.zeros_like(b.adv), b.bootstrap)
    assert clone.loss({"policy": score}, clone.weigh(b, {}, 1), {})[1]["entropy"][1] == np.asarray(b.mask).sum()


def test_a_penalty_in_the_reward_is_the_policys_own():
    """Neither its own return to go nor what steers ``kl_coef`` holds the divergence at the expert's words."""
    b = conversations(16, expert=(1, 4))
    algorithm = compose(
        advantage="returns", baseline="none", collect="mixed_expert", imitation="luffy", kl="k1", kl_in="reward",
        finish="adapt_kl",
    )  # fmt: skip
    hyper = {k: jnp.float32(v) for k, v in algorithm.hyper.items()}

    def score(view, of):
        logp = {"policy": b.logp_old, "reference": b.extra["logp_ref"]}[view.model]
        return Score(logp, logp, logp, of.bootstrap)

    memory = algorithm.init(jax.random.key(0), Shape(8, 3, 24, TURNS))
    _, out, seen = algorithm.prepare(memory, b.traj, tools_of(b, score=score), hyper, jax.random.key(1))
    own = np.asarray(b.traj.mask & ~b.traj.expert)
    penalty = np.where(own, np.asarray(b.logp_old - b.extra["logp_ref"]), 0)
    np.testing.assert_allclose(seen["kl_reward"], (penalty.sum(), own.sum()), rtol=1e-4, atol=1e-5)
    expected = np.cumsum((np.asarray(b.traj.reward) - 0.01 * penalty)[:, ::-1], 1)[:, ::-1]
    mask = np.asarray(b.traj.mask)
    np.testing.assert_array_equal(out.mask, mask)
    np.testing.assert_allclose(np.where(mask, out.adv, 0), np.where(mask, expected, 0), atol=1e-5)


GROUPS = np.asarray((0, 0, 0, 1, 1, 1, 2, 2))


def relative(values, ids, scale):
    out = np.zeros(len(values))
    for i in set(ids.tolist()):
        mine = ids == i
        x = values[mine]
        if len(x) > 1 and np.ptp(x) > 0:
            out[mine] = (x - x.mean()) / (x.std(ddof=1) + 1e-6 if scale == "std" else 1.0)
    return out


@pytest.mark.parametrize("scale", ["none", "std"])
def test_turns_of_one_tag_are_compared(scale):
    b = conversations(15)
    part = credit.tag_relative(tag="tool_calls", part="answered", scale=scale)
    assert part.needs == {"group", "parts:tool_calls", "parts:answered"}
    out, _ = run(part, b, tag_coef=0.5)
    played = np.asarray(b.traj.steps["played"])
    tag, paid = (np.asarray(b.traj.steps[name]) for name in ("tool_calls", "answered"))
    rows, turns = np.nonzero(played)
    each = relative(paid[rows, turns], GROUPS[rows] * 2 + tag[rows, turns].astype(int), scale)
    adv = np.zeros(played.shape)
    adv[rows, turns] = relative(np.asarray(b.traj.reward).sum(1), GROUPS, scale)[rows] + 0.5 * each
    expected = np.where(b.mask, np.take_along_axis(adv, np.maximum(np.asarray(b.traj.turn), 0), 1), 0)
    np.testing.assert_allclose(out.adv, expected, atol=1e-5)
    halves, _ = run(part, split(b), segments=2, tag_coef=0.5)
    np.testing.assert_allclose(joined(halves.adv), out.adv, atol=1e-5)


def told(view, of):
    """Scores out of the batch itself: its log-probabilities, and half its entropies for the chance to agree."""
    assert view.statistic is scoring.collision
    return Score(of.logp_old, 0.5 * of.extra["entropy"], of.value, of.bootstrap)


def test_the_optimal_baseline_of_a_token():
    b, part = conversations(16, groups=(0, 0, 0, 1, 1, 1, 2)), credit.optimal_token()
    out, _ = run(part, b, tools=tools_of(b, score=told))
    mask, reward = np.asarray(b.mask), np.asarray(b.traj.reward, np.float64)
    energy = 1 - 2 * np.exp(np.asarray(b.logp_old, np.float64)) + 0.5 * np.asarray(b.extra["entropy"])
    expected = np.zeros(mask.shape)
    for i in range(7):
        for k, t in enumerate(np.flatnonzero(mask[i])):
            top = bottom = mates = 0.0
            for j in np.flatnonzero(GROUPS[:7] == GROUPS[i]):
                own = np.flatnonzero(mask[j])
                if k < len(own):
                    weight = np.maximum(energy[j, own[: k + 1]], 0).sum()
                    top, bottom, mates = top + weight * reward[j, own[k] :].sum(), bottom + weight, mates + 1
            expected[i, t] = reward[i, t:].sum() - top / bottom if mates > 1 else 0.0
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(out.adv, expected, atol=1e-5)
    assert not np.asarray(out.adv)[6].any()
    # Contexts that restart, and observations of any length and content, change nothing.
    halves = split(b)
    found, _ = run(part, halves, tools=tools_of(halves, segments=2, score=told))
    np.testing.assert_allclose(joined(found.adv), out.adv, atol=1e-5)
    wide, keep = with_gap(b)
    found, _ = run(part, wide, tools=tools_of(wide, score=told))
    np.testing.assert_allclose(np.asarray(found.adv)[:, keep], out.adv, atol=1e-5)


def test_equal_returns_leave_exactly_nothing():
    b = conversations(17)
    last = np.asarray([np.flatnonzero(row)[-1] for row in np.asarray(b.mask)])
    b = b._replace(traj=b.traj._replace(reward=jnp.zeros(b.mask.shape).at[jnp.arange(8), last].set(0.3)))
    assert not np.asarray(run(credit.optimal_token(), b, tools=tools_of(b, score=told))[0].adv).any()


def test_the_energy_of_a_token_is_the_squared_gradient_in_its_logits():
    tokens = jnp.asarray([[256, 97, 98, 99]], jnp.int32)
    params, allowed = tiny_params(), jnp.asarray(CODEC.sampleable)
    logp, chance, _ = scoring.token_scores(
        POLICY, params, tokens, jnp.ones(1), allowed=allowed, statistic=scoring.collision
    )
    logits = jnp.where(allowed, POLICY.logits(params, POLICY.forward(params, tokens).hidden)[0], -jnp.inf)
    slope = jax.vmap(jax.grad(lambda x, y: jax.nn.log_softmax(x)[y]))(logits[:-1], tokens[0, 1:])
    energy = 1.0 - 2.0 * jnp.exp(logp) + chance
    np.testing.assert_allclose(energy[0, 1:], np.square(slope).sum(1), rtol=1e-4)


def test_new_keywords_take_a_whole_step_together():
    algorithm = compose(
        advantage="optimal_token", filters="not_all_correct", correction="tis", normalise_weights=True, veto=True,
        offpolicy_mask=True, kl="k3", kl_corrected=True,
    )  # fmt: skip
    step, state = stepped(algorithm)
    after, found = step(state)
    numbers = {k: float(v) for k, v in metrics.finalize(found).items()}
    assert numbers["grad_norm"] > 0 and numbers["skipped_updates"] == 0 and int(after.updates) == 1
    # What was sampled is what is trained: weights of 1, nobody vetoed, nobody silenced.
    np.testing.assert_allclose([numbers["correction_weight"], numbers["kept_offpolicy"]], [1, 1], atol=1e-3)


def test_a_reward_model_learns_to_rank():
    """The value behind the last token: its loss falls from step to step on the pairs of a step, accuracy rises."""
    algorithm = prefer(loss="bradley_terry")
    assert algorithm.needs == {"pairs", "critic"}
    with pytest.raises(ValueError, match="custom needs a critic: build the policy with a value head"):
        make_step(POLICY._replace(has_value=False), CODEC, ENV, algorithm, CONFIG)
    step, state = stepped(algorithm)
    before = state.params["policy"]
    after, found = step(state)
    numbers = {k: float(v) for k, v in metrics.finalize(found).items()}
    np.testing.assert_allclose(numbers["loss"], np.log(2) * (numbers["pairs_kept"] > 0), rtol=1e-5)
    assert numbers["margin"] == 0 and np.any(after.params["policy"]["value"] != before["value"])
    losses = [numbers["loss"]]
    for _ in range(5):
        after, found = step(after)
        losses.append(float(metrics.finalize(found)["loss"]))
    assert np.mean(losses[-3:]) < losses[0]


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
