import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import TransformerConfig, transformer_policy
from agentrl_jax.models import cache as kv
from agentrl_jax.models.attention import decode_attention, grouped_attention, rope_angles, rotate
from agentrl_jax.models.testing import check_policy

V = 13
SMALL = functools.partial(TransformerConfig, V, layers=1, width=16, heads=4, mlp_width=24)


def init(config):
    policy = transformer_policy(config)
    return policy, jax.jit(policy.init)(jax.random.key(0))


@pytest.mark.parametrize(
    "config",
    [SMALL(layers=2, kv_heads=2, value_head=True, cache_widths=(4, 9, 99)), SMALL(kv_heads=1, tied=False, head_dim=6)],
    ids=["grouped, tied, value, widths", "one kv head, untied"],
)
def test_conforms(config):
    check_policy(transformer_policy(config), V)


def test_bfloat16_agrees_loosely():
    policy, params = init(SMALL(kv_heads=2, dtype="bfloat16", param_dtype="bfloat16"))
    tokens = np.random.default_rng(0).integers(0, V, (2, 6))
    score = jax.jit(lambda t: policy.logits(params, policy.forward(params, t).hidden))
    extend, logits = jax.jit(policy.extend), jax.jit(policy.logits)
    zero, expected = jnp.zeros(2, jnp.int32), score(tokens)
    out, cache = extend(params, policy.init_cache(2, 6), tokens[:, :5], zero, zero + 5)
    assert {x.dtype for x in jax.tree.leaves((cache, params))} == {jnp.dtype("bfloat16")}
    last, _ = extend(params, cache, tokens[:, 5:], zero + 5, zero + 1)
    got = jnp.concatenate([logits(params, out.hidden), logits(params, last.hidden)], 1)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=0.1)


def test_causality_by_gradient():
    policy, params = init(TransformerConfig(8, layers=2, width=16, heads=4, kv_heads=2, mlp_width=24))

    @jax.grad
    def reach(params):
        # Every position reads its own row of the table, so the gradient is per position.
        return policy.forward(params, jnp.arange(8)[None]).hidden[0, 5].sum()

    reached = np.abs(jax.jit(reach)(params)["embedding"]).sum(-1)
    assert np.all(reached[:6] > 0) and np.all(reached[6:] == 0)


# P37: positions count real tokens; a row alone and a row in a ragged batch are the same.
def test_padding_and_batch_mates_change_nothing():
    policy, params = init(SMALL(layers=2, kv_heads=2))
    tokens = np.random.default_rng(0).integers(0, V, (2, 12))
    forward, extend = jax.jit(lambda t: policy.forward(params, t).hidden), jax.jit(policy.extend)
    alone = np.concatenate([forward(tokens[:1]), forward(tokens[1:])])
    for pad in (0, 7):
        ragged = tokens.copy()
        ragged[0, 3:] = pad
        hidden = forward(ragged)
        np.testing.assert_allclose(hidden[0, :3], alone[0, :3], atol=1e-5)
        np.testing.assert_allclose(hidden[1], alone[1], atol=1e-5)
    start = np.array([3, 4])
    _, cache = extend(params, policy.init_cache(2, 12), tokens[:, :4], jnp.zeros(2, jnp.int32), start)
    for step in range(8):
        token = np.take_along_axis(tokens, (start + step)[:, None], 1)
        out, cache = extend(params, cache, token, start + step, jnp.ones(2, jnp.int32))
        np.testing.assert_allclose(out.hidden[:, 0], alone[np.arange(2), start + step], atol=1e-5)


# P40: query head h reads kv head h // (H / KV).
def test_query_heads_share_kv_heads_in_order():
    q, position = jnp.zeros((1, 1, 4, 2)), jnp.zeros((1, 1), jnp.int32)
    k, v = jnp.zeros((1, 2, 2, 1)), jnp.array([10.0, 20.0]).reshape(1, 2, 1, 1) * jnp.ones(2)
    assert jax.jit(grouped_attention)(q, k, v, position)[0, 0, :, 0].tolist() == [10, 10, 20, 20]
    assert jax.jit(decode_attention, static_argnums=4)(q, k, v, position, 1)[0, 0, :, 0].tolist() == [10, 10, 20, 20]


def repeated_attention(q, k, v, position):
    """Plain attention with repeated kv heads, in float64."""
    B, C, H, d = q.shape
    repeat = H // k.shape[1]
    k, v = np.repeat(k, repeat, 1), np.repeat(v, repeat, 1)
    out = np.zeros(q.shape)
    for b, c, h in np.ndindex(B, C, H):
        seen = min(position[b, c] + 1, v.shape[2])
        score = q[b, c, h] @ k[b, h, :, :seen] / np.sqrt(d)
        weight = np.exp(score - score.max())
        out[b, c, h] = weight / weight.sum() @ v[b, h, :seen]
    return out


@pytest.mark.parametrize("size", [7, 8, 21, 48])
def test_attention_against_loops(size):
    rng = np.random.default_rng(size)
    q, k, v = rng.normal(size=(2, 3, 6, 4)), rng.normal(size=(2, 2, 4, 53)), rng.normal(size=(2, 2, 53, 4))
    position = rng.integers(0, size, (2, 3))
    expected = repeated_attention(q, k[..., :size], v[:, :, :size], position)
    f = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    got = jax.jit(grouped_attention)(f[0], f[1][..., :size], f[2][:, :, :size], jnp.asarray(position))
    np.testing.assert_allclose(got, expected, atol=1e-5)
    got = jax.jit(decode_attention, static_argnums=4)(f[0][:, :1], f[1], f[2], jnp.asarray(position[:, :1]), size)
    np.testing.assert_allclose(got, expected[:, :1], atol=1e-5)


def test_rotation_is_half_split_and_relative():
    cos, sin = rope_angles(jnp.array([[0, 1]]), 4, 100.0)
    np.testing.assert_allclose(np.arctan2(sin, cos)[0], [[0, 0], [1, 0.1]], atol=1e-6)
    x = rotate(jnp.array([1.0, 0, 0, 0]).reshape(1, 1, 1, 4), rope_angles(jnp.array([[1]]), 4, 100.0))
    np.testing.assert_allclose(x[0, 0, 0], [np.cos(1), 0, np.sin(1), 0], atol=1e-6)  # pairs are (0, 2) and (1, 3)
    a, b = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

    @jax.jit
    def score(i, j):
        turned = [rotate(x, rope_angles(jnp.array([[p]]), 8, 1e4)) for x, p in ((a, i), (b, j))]
        return jnp.sum(turned[0] * turned[1])

    np.testing.assert_allclose(score(9, 4), score(25, 20), rtol=1e-4)


# P41: one leaf serves both ends, and both contribute to its gradient.
def test_tied_embeddings_are_one_leaf():
    shapes = [jax.eval_shape(transformer_policy(SMALL(tied=t)).init, jax.random.key(0)) for t in (True, False)]
    shapes = [[x.shape for x in jax.tree.leaves(tree)] for tree in shapes]
    assert shapes[0].count((V, 16)) == 1 and shapes[1].count((V, 16)) == 2
    policy = transformer_policy(TransformerConfig(2, layers=1, width=1, heads=1, head_dim=2))

    def loss(table):
        return -jax.nn.log_softmax(policy.logits({"embedding": table}, table[0][None]))[0, 1]

    value, grad = jax.jit(jax.value_and_grad(loss))(jnp.array([[1.0], [2.0]]))
    np.testing.assert_allclose(value, 0.31326163, atol=1e-6)
    np.testing.assert_allclose(grad[:, 0], [0, -0.26894142], atol=1e-6)


def test_value_head_starts_at_zero_and_learns():
    policy, params = init(SMALL(value_head=True))
    assert policy.has_value
    total = jax.jit(jax.value_and_grad(lambda p: policy.forward(p, jnp.arange(6)[None]).value.sum()))
    value, grad = total(params)
    assert value == 0 and np.any(grad["value"]["kernel"]) and np.any(grad["value"]["bias"])


def test_unknown_token_ids_are_visible():
    policy, params = init(SMALL())
    hidden = jax.jit(policy.forward)(params, jnp.array([[1, 2], [1, V], [1, -1]])).hidden
    assert np.all(np.isfinite(hidden[0])) and np.all(np.isnan(hidden[1:, 1]))


def test_equal_configurations_give_the_identical_policy():
    assert transformer_policy(SMALL()) is transformer_policy(SMALL(kv_heads=4, head_dim=4))
    with pytest.raises(ValueError, match="inputs"):
        transformer_policy(SMALL()).forward({}, jnp.zeros((1, 1), jnp.int32), inputs=jnp.zeros(1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 0}, "layers=0 must be a whole number of at least 1"),
        ({"width": 2.5}, "width=2.5"),
        ({"heads": 3}, "width=16 is not a multiple of heads=3"),
        ({"kv_heads": 3}, "kv_heads=3 must divide heads=4"),
        ({"kv_heads": -1}, "kv_heads=-1"),
        ({"head_dim": 5}, "head_dim=5 must be even"),
        ({"rope_theta": 0.0}, "rope_theta=0.0"),
        ({"dtype": "int8"}, "dtype='int8' is not one of float32"),
        ({"cache_widths": (8, 4)}, "must be ascending"),
    ],
)
def test_bad_configurations_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SMALL(**fields)


def test_cache_widths():
    config = SMALL()
    assert kv.widths(config, 192) == (48, 96, 144, 192)
    assert kv.widths(config, 100) == (32, 64, 80, 100)
    assert kv.widths(config, 16) == (16,)
    assert kv.widths(SMALL(cache_widths=(4, 8, 99)), 12) == (4, 8, 12)


# Every layer's cache must be updated where it stands: a copy at every token would cost more than the model.
def test_decoding_in_a_loop_copies_no_cache():
    config = SMALL(cache_widths=(8, 24))
    policy = transformer_policy(config)

    def decode(params, cache):
        def body(c):
            i, cache, token, start = c
            out, cache = policy.extend(params, cache, token, start, jnp.ones(5, jnp.int32))
            token = jnp.argmax(policy.logits(params, out.hidden), -1).astype(jnp.int32)
            return i + 1, cache, token, start + 1

        carry = (0, cache, jnp.zeros((5, 1), jnp.int32), jnp.arange(5))
        return jax.lax.while_loop(lambda c: c[0] < 7, body, carry)

    params, cache = jax.eval_shape(policy.init, jax.random.key(0)), jax.eval_shape(lambda: policy.init_cache(5, 41))
    hlo = jax.jit(decode, donate_argnums=1).lower(params, cache).compile().as_text()
    shapes = ("f32[5,4,4,41]", "f32[5,4,41,4]")
    copies = [line for line in hlo.splitlines() if " copy(" in line and any(f"= {s}" in line for s in shapes)]
    assert any(s in hlo for s in shapes) and not copies, copies


def test_vmap_over_parameters_keeps_the_width_switch():
    policy = transformer_policy(SMALL(cache_widths=(8,)))
    params = jax.eval_shape(jax.vmap(policy.init), jax.random.split(jax.random.key(0), 3))
    cache = jax.eval_shape(jax.vmap(lambda _: policy.init_cache(5, 24)), jnp.zeros(3))
    args = jnp.zeros((3, 5, 1), jnp.int32), jnp.zeros((3, 5), jnp.int32), jnp.ones((3, 5), jnp.int32)
    jaxpr = str(jax.make_jaxpr(jax.vmap(policy.extend))(params, cache, *args))
    assert "cond[" in jaxpr and "f32[3,5,4,4,24] = select_n" not in jaxpr
