"""Presets: what exists, what is refused before anything compiles, which numbers they read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CODEC, POLICY

from agentrl_jax import (
    TrainConfig,
    UpdateConfig,
    algorithms,
    codecs,
    envs,
    groups,
    make_hyper,
    make_init,
    make_step,
    objectives,
    scoring,
    stages,
    surrogates,
    train,
)

ENV = envs.make("probe_observation")


def test_unknown_names_list_what_exists():
    with pytest.raises(ValueError, match=r"unknown algorithm 'gpro'; known: archer, .*grpo, .*rloo"):
        algorithms.make("gpro")
    with pytest.raises(
        ValueError, match=r"grpo has no option \['clop'\]; it has: eps_low, eps_high, entropy_coef, coll"
    ):
        algorithms.make("grpo", clop=0.1)


def test_options_become_traced_numbers():
    assert algorithms.make("grpo", eps_high=0.28).hyper["eps_high"] == 0.28
    hyper = make_hyper(
        algorithms.make("ppo"), ENV, lambda_=0.5, learning_rate=1, env_params=ENV.params._replace(reward=2)
    )
    assert all(isinstance(x, jax.Array) and not x.weak_type for x in jax.tree.leaves(hyper))
    assert hyper.algorithm["lambda_"] == 0.5 and hyper.algorithm["discount"] == 1 and hyper.learning_rate == 1
    assert hyper.env_params.reward == 2


@pytest.mark.parametrize("name", ["grpo", "rloo", "ppo"])
def test_a_penalty_is_there_with_its_reference_or_not_at_all(name):
    """A coefficient that nothing reads would be ignored in silence."""
    plain, held = algorithms.make(name), algorithms.make(name, kl_coef=0.1)
    assert "reference" not in plain.needs and "reference" in held.needs and held.hyper["kl_coef"] == 0.1
    with pytest.raises(ValueError, match=rf"unknown hyper-parameters \['kl_coef'\]; {name} has: "):
        make_hyper(plain, ENV, kl_coef=0.1)
    init = make_init(POLICY, CODEC, ENV, held, TrainConfig(4, 2, max_tokens=8))
    state = init(jax.random.key(0))
    assert set(state.params) == {"policy", "reference"} and set(state.opt_state.mu) == {"policy"}


def test_unknown_numbers_name_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown hyper-parameters \['learning_rte'\]; grpo has: .*learning_rate"):
        make_hyper(algorithms.make("grpo"), ENV, learning_rte=1.0)


@pytest.mark.parametrize(
    "number, message",
    [
        ({"discount": 1.1}, r"discount must be in \[0, 1\], got 1.1"),
        ({"lambda_": -0.1}, r"lambda_ must be in \[0, 1\], got -0.1"),
        ({"learning_rate": -1.0}, "learning_rate must not be negative, got -1.0"),
        ({"temperature": -1}, "temperature must not be negative, got -1"),
        ({"eps_low": -0.2}, "eps_low must not be negative, got -0.2"),
        ({"value_coef": float("nan")}, "value_coef must be finite, got nan"),
        ({"entropy_coef": np.inf}, "entropy_coef must be finite, got inf"),
        ({"learning_rate": np.float32(-1)}, "learning_rate must not be negative, got -1.0"),
        ({"eps_high": jnp.asarray([0.1, -0.1])}, "eps_high must not be negative"),
        ({"warmup": True}, "warmup must be a number, got True"),
        ({"beta_": "x"}, r"unknown hyper-parameters \['beta_'\]"),
        ({"discount": "x"}, "discount must be a number, got 'x'"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive, got 0.0"),
    ],
)
def test_numbers_out_of_range_are_refused(number, message):
    with pytest.raises(ValueError, match=message):
        make_hyper(algorithms.make("ppo"), ENV, **number)


def config(**fields):
    structure = UpdateConfig(**{k: fields.pop(k) for k in tuple(fields) if k in UpdateConfig._fields})
    return TrainConfig(**({"episodes": 8, "group_size": 4, "max_tokens": 8, "update": structure} | fields))


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("grpo", {"episodes": 9}, r"episodes \(9\) must be a multiple of group_size \(4\)"),
        ("grpo", {"episodes": 0}, r"episodes \(0\) must be a multiple"),
        ("grpo", {"slots": 9}, r"slots must be in \[1, episodes = 8\], got 9"),
        ("grpo", {"slots": 0}, r"slots must be in \[1, episodes = 8\], got 0"),
        ("grpo", {"group_size": 1}, "grpo compares members of a group: group_size must be at least 2, got 1"),
        ("rloo", {"group_size": 1}, "rloo compares members of a group"),
        ("online_dpo", {"group_size": 1}, "online_dpo compares members of a group"),
        ("reinforce", {"epochs": 0}, "epochs must be at least 1, got 0"),
        ("reinforce", {"minibatches": 3}, "8 units do not split into 3 minibatches of 1 micro-batches"),
        ("reinforce", {"microbatches": 0}, "microbatches must be at least 1, got 0"),
        ("online_dpo", {"minibatches": 4}, "2 units do not split into 4 minibatches"),
        ("reinforce", {"schedule": "step"}, "schedule must be constant, linear or cosine, got 'step'"),
        ("reinforce", {"optimizer": "lion"}, "optimizer must be adam or sgd, got 'lion'"),
        ("reinforce", {"epochs": 2}, "reinforce does not correct for a policy that has moved.* got 2 and 1"),
        ("rloo", {"minibatches": 2}, "rloo does not correct for a policy that has moved.* got 1 and 2"),
        ("grpo", {"widths": (-4, 6)}, r"widths must be in \[1, max_tokens = 8\], got \(-4, 6\)"),
        ("grpo", {"widths": (500,)}, r"widths must be in \[1, max_tokens = 8\], got \(500,\)"),
        ("grpo", {"vocab_chunk": 0}, "vocab_chunk must be at least 1, got 0"),
        ("grpo", {"chunk": 0}, "chunk must be at least 1, got 0"),
        ("grpo", {"max_tokens": 4}, "max_tokens must be at least 5, an empty prompt and one byte of action, got 4"),
    ],
)
def test_structure_that_cannot_work_is_refused_before_anything_compiles(name, change, message):
    for make in (make_init, make_step):
        with pytest.raises(ValueError, match=message):
            make(POLICY, CODEC, ENV, algorithms.make(name), config(**change))


def test_unknown_needs_and_models_are_refused():
    odd = algorithms.make("grpo")._replace(needs=frozenset({"group", "tutor"}))
    with pytest.raises(ValueError, match=r"grpo needs \['tutor'\], which nothing provides; known: critic, expert"):
        make_init(POLICY, CODEC, ENV, odd, config())
    odd = algorithms.make("grpo")._replace(views={"policy": scoring.View(), "old": scoring.View("reference")})
    with pytest.raises(ValueError, match="grpo: the view 'old' asks for the model 'reference'; there is: policy"):
        make_step(POLICY, CODEC, ENV, odd, config())
    train.check(POLICY, CODEC, ENV, odd._replace(needs=frozenset({"reference"})), config())


def test_a_policy_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="the policy has 264 logits, and the codec 'byte' has 272 ids"):
        make_init(POLICY, codecs.byte(272), ENV, algorithms.make("grpo"), config())


@pytest.mark.parametrize("name", ["entropy", "length", "loss", "thinking"])
def test_info_under_the_name_of_a_metric_is_refused(name):
    env = ENV._replace(spec=ENV.spec._replace(info=(*ENV.spec.info, (name, "float32"))))
    with pytest.raises(ValueError, match=rf"EnvSpec.info must not use the names \['{name}'\], which are metrics"):
        make_step(POLICY, CODEC, env, algorithms.make("grpo"), config())


def test_a_missing_critic_or_expert_is_refused():
    with pytest.raises(ValueError, match="ppo needs a critic: build the policy with a value head"):
        make_step(POLICY._replace(has_value=False), CODEC, ENV, algorithms.make("ppo"), config())
    with pytest.raises(ValueError, match=r"behavior_cloning needs env.expert, and probe_observation has none"):
        make_step(POLICY, CODEC, ENV._replace(expert=None), algorithms.make("behavior_cloning"), config())
    train.check(POLICY, CODEC, ENV, algorithms.make("ppo"), config())


@pytest.mark.parametrize(
    "name, option, message",
    [
        ("grpo", {"aggregation": "mean"}, "Unknown aggregation mode 'mean'"),
        ("grpo", {"aggregation": "seq-mean-token-sum-norm"}, "needs norm="),
        ("grpo", {"aggregation": "seq-mean-token-sum-norm", "norm": 0}, "norm must be positive, got 0"),
        ("grpo", {"norm": "long"}, "norm must be a number, got 'long'"),
        ("grpo", {"scale": "zzz"}, "Unknown scale 'zzz'. Known: std, none"),
        ("grpo", {"ddof": -3}, "ddof must be at least 0, got -3"),
        ("grpo", {"ddof": True}, "ddof must be a number, got True"),
        ("grpo", {"kl": "k9"}, "Unknown kl 'k9'. Known: k1, k2, k3"),
        ("grpo", {"eps_low": -1}, "eps_low must not be negative, got -1"),
        ("grpo", {"eps_high": True}, "eps_high must be a number, got True"),
        ("rloo", {"kl_coef": -0.1}, "kl_coef must not be negative, got -0.1"),
        ("rloo", {"aggregation": 3}, "rloo: aggregation must be of type str, got 3"),
        ("lcpo", {"all_correct": "no"}, "lcpo: all_correct must be of type bool, got 'no'"),
        ("ppo", {"lambda_": 2}, r"lambda_ must be in \[0, 1\], got 2"),
        ("reinforce", {"baseline": "mean"}, "baseline must be 'ema' or 'none'"),
        ("online_dpo", {"beta": np.nan}, "beta must be finite, got nan"),
    ],
)
def test_options_are_refused_when_a_preset_is_made(name, option, message):
    with pytest.raises(ValueError, match=message):
        algorithms.make(name, **option)


def test_the_numbers_of_a_preset_are_checked_too():
    with pytest.raises(ValueError, match="eps_low must not be negative, got -1"):
        make_hyper(algorithms.make("grpo", eps_low=-1.0), ENV)


def test_stages_and_objectives_refuse_unknown_choices():
    for make in (lambda: stages.kl_in_reward("k9"), lambda: objectives.token_objective(surrogates.likelihood, kl="k9")):
        with pytest.raises(ValueError, match=r"'k9'\. Known: k1, k2"):
            make()
    with pytest.raises(ValueError, match="ddof must be at least 0, got -1"):
        stages.whiten(-1)
    with pytest.raises(ValueError, match="k must be above 0"):
        stages.group_advantage(groups.pass_at_k_advantage, k=0)


def test_the_caller_keeps_his_arrays():
    """The state may be donated: nothing in it is the caller's own array."""
    algorithm = algorithms.make("grpo", kl_coef=0.1)
    hyper, p = make_hyper(algorithm, ENV), {"w": jnp.ones(2)}
    state = make_init(POLICY, CODEC, ENV, algorithm, config())(jax.random.key(0), hyper, p)
    own = {x.unsafe_buffer_pointer() for x in jax.tree.leaves((hyper, p))}
    held = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((state.params, state.hyper))]
    assert not own & set(held) and len(set(held)) == len(held)
    jax.tree.map(np.testing.assert_array_equal, (state.params["policy"], state.params["reference"]), (p, p))
