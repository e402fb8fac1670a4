"""The policy contract is about functions: a gated recurrent network in plain JAX passes the same suite."""

import jax
import jax.numpy as jnp
import pytest

from agentrl_jax.models.testing import check_policy
from agentrl_jax.policy import Output, Policy

V, D = 11, 8


def init(key):
    k = jax.random.split(key, 4)
    return {
        "embed": jax.random.normal(k[0], (V, D)),
        "gate": jax.random.normal(k[1], (2 * D, D)) * 0.3,
        "mix": jax.random.normal(k[2], (2 * D, D)) * 0.3,
        "head": jax.random.normal(k[3], (D, V)) * 0.3,
    }


def cell(params, h, token):
    x = jnp.concatenate([h, params["embed"][token]], axis=-1)
    gate = jax.nn.sigmoid(x @ params["gate"])
    return gate * h + (1 - gate) * jnp.tanh(x @ params["mix"])


def run(params, h, tokens, exists):
    def step(h, x):
        token, real = x
        h = jnp.where(real[:, None], cell(params, h, jnp.where(real, token, 0)), h)
        return h, h

    h, hidden = jax.lax.scan(step, h, (tokens.T, exists.T))
    hidden = hidden.transpose(1, 0, 2)
    return h, Output(hidden, jnp.zeros(hidden.shape[:2]))


def forward(params, tokens, inputs=None):
    return run(params, jnp.zeros((tokens.shape[0], D)), tokens, jnp.ones(tokens.shape, bool))[1]


def logits(params, hidden):
    return hidden @ params["head"]


def init_cache(batch, capacity):
    return {"h": jnp.zeros((batch, D)), "capacity": jnp.full(batch, capacity)}


def extend(params, cache, tokens, start, count, inputs=None):
    offset = jnp.arange(tokens.shape[1])[None, :]
    exists = (offset < count[:, None]) & (start[:, None] + offset < cache["capacity"][:, None])
    fresh = exists[:, :1] & (start[:, None] == 0)
    h, out = run(params, jnp.where(fresh, 0.0, cache["h"]), tokens, exists)
    return out, {**cache, "h": h}


RECURRENT = Policy(init, forward, logits, init_cache, extend)


def test_plain_functions_conform():
    check_policy(RECURRENT, V)


def forgets_count(params, cache, tokens, start, count, inputs=None):
    return extend(params, cache, jnp.clip(tokens, 0, V - 1), start, jnp.full_like(count, tokens.shape[1]))


def keeps_state(params, cache, tokens, start, count, inputs=None):
    return extend(params, cache, tokens, jnp.maximum(start, 1), count)


def clamps(params, cache, tokens, start, count, inputs=None):
    out, new = extend(params, cache, tokens, jnp.minimum(start, cache["capacity"] - 1), count)
    return out, new


def peeks(params, tokens, inputs=None):
    out = forward(params, tokens)
    return out._replace(hidden=out.hidden + out.hidden[:, -1:])


def mixes(params, tokens, inputs=None):
    out = forward(params, tokens)
    return out._replace(hidden=out.hidden + out.hidden.mean(0, keepdims=True))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"extend": forgets_count}, "disagrees with forward"),
        ({"extend": keeps_state}, "reused slot"),
        ({"extend": clamps}, "capacity"),
        ({"forward": peeks}, "before it"),
        ({"forward": mixes}, "other rows"),
        ({"logits": lambda p, h: (h @ p["head"]).astype(jnp.bfloat16)}, "float32"),
        ({"init_cache": lambda b, c: {"h": jnp.zeros((b, D)), "capacity": jnp.int32(c)}}, "batch must lead"),
    ],
)
def test_check_policy_finds_faults(fault, message):
    with pytest.raises(AssertionError, match=message):
        check_policy(RECURRENT._replace(**fault), V)
