import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jitted import call

from agentrl_jax import masked

NORM = {"seq-mean-token-sum-norm": 4.0}


@functools.cache
def compiled(mode):
    def run(x, mask):
        return masked.aggregate(x, mask, mode, norm=NORM.get(mode))

    return jax.jit(jax.value_and_grad(run))


def total(x, mask, mode):
    return float(compiled(mode)(jnp.asarray(x, jnp.float32), jnp.asarray(mask))[0])


@pytest.mark.parametrize("mode", masked.MODES)
@pytest.mark.parametrize("seed", range(3))
def test_aggregate_equals_the_oracle(mode, seed):
    x, _, _, _, mask = oracles.ragged(seed)
    assert total(x, mask, mode) == pytest.approx(oracles.aggregate(x, mask, mode, NORM.get(mode)), abs=1e-5)


def test_p01_every_mode_has_its_own_number():
    x = np.array([[1, 1, 1, 1], [4, 0, 0, 0.0]])
    mask = np.array([[1, 1, 1, 1], [1, 0, 0, 0]], bool)
    want = {"token-mean": 1.6, "token-sum": 8.0, "seq-mean-token-sum": 4.0, "seq-mean-token-mean": 2.5}
    for mode, number in want.items():
        assert total(x, mask, mode) == pytest.approx(number)
    assert total(x, mask, "seq-mean-token-sum-norm") == pytest.approx(1.0)
    wide = call(masked.aggregate, jnp.asarray(x), jnp.asarray(mask), "seq-mean-token-sum-norm", norm=8)
    assert float(wide) == pytest.approx(0.5)
    adv = -np.where(mask, np.array([[1.0], [-1.0]]), 0)
    assert total(adv, mask, "token-mean") == pytest.approx(-0.6)
    assert total(adv, mask, "seq-mean-token-mean") == pytest.approx(0.0)
    assert total(adv, mask, "seq-mean-token-sum-norm") == pytest.approx(-0.375)


@pytest.mark.parametrize("mode", masked.MODES)
def test_p01_padding_columns_change_nothing(mode):
    x, _, _, _, mask = oracles.ragged(5)
    padded = np.pad(x, ((0, 0), (0, 4)), constant_values=7.0)
    longer = np.pad(mask, ((0, 0), (0, 4)))
    assert total(padded, longer, mode) == pytest.approx(total(x, mask, mode), rel=1e-6)


@pytest.mark.parametrize("mode", masked.MODES)
def test_p03_empty_batch_is_exactly_zero_with_zero_gradient(mode):
    value, grad = compiled(mode)(jnp.full((2, 2), jnp.nan), jnp.zeros((2, 2), bool))
    assert float(value) == 0.0
    np.testing.assert_array_equal(grad, 0.0)


def test_p03_empty_rows_stay_out_of_sequence_means():
    x = np.array([[2, 2], [9, 9.0]])
    mask = np.array([[1, 1], [0, 0]], bool)
    assert total(x, mask, "token-mean") == 2.0
    assert total(x, mask, "seq-mean-token-mean") == 2.0
    assert total(x, mask, "seq-mean-token-sum") == 4.0


@pytest.mark.parametrize("mode", masked.MODES)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_garbage_outside_the_mask_touches_neither_value_nor_gradient(mode, garbage):
    x, _, _, _, mask = oracles.ragged(2)
    clean, grad = compiled(mode)(jnp.asarray(x, jnp.float32), mask)
    dirty, dirty_grad = compiled(mode)(jnp.asarray(np.where(mask, x, garbage), jnp.float32), mask)
    assert float(clean) == float(dirty)
    np.testing.assert_array_equal(grad, dirty_grad)


@pytest.mark.parametrize("mode", masked.MODES)
def test_p42_weights_of_the_whole_batch_add_over_any_split(mode):
    x, _, _, _, mask = oracles.ragged(3, rows=6)
    weight = np.asarray(call(masked.aggregation_weights, jnp.asarray(mask), mode, norm=NORM.get(mode)))
    product = weight * x
    whole = total(x, mask, mode)
    for cuts in ([3], [2, 4], [1, 2, 3, 4, 5], [1]):
        assert sum(part.sum() for part in np.split(product, cuts)) == pytest.approx(whole, rel=1e-5)


def test_dropping_leaves_the_denominator_and_rejecting_does_not():
    x = jnp.array([[1.0, 3.0, 8.0]])
    mask = jnp.ones((1, 3), bool)
    keep = jnp.array([[True, True, False]])
    assert float(call(masked.aggregate, x, mask & keep, "token-mean")) == 2.0
    assert float(call(masked.aggregate, x * keep, mask, "token-mean")) == pytest.approx(4 / 3)


def test_pair_batches_count_every_leading_axis_as_sequences():
    *_, mask = oracles.ragged(4, rows=6)
    pairs = call(masked.aggregation_weights, jnp.asarray(mask).reshape(3, 2, -1), "seq-mean-token-mean")
    flat = call(masked.aggregation_weights, jnp.asarray(mask), "seq-mean-token-mean")
    np.testing.assert_allclose(pairs.reshape(6, -1), flat)


def test_rows_of_one_sequence_weigh_like_the_unsplit_sequence():
    x = np.array([[1, 2, 3, 4], [5, 6, 0, 0.0]])
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
    split_x = np.array([[1, 2, 0, 0], [3, 4, 0, 0], [5, 6, 0, 0.0]])
    split_mask = np.array([[1, 1, 0, 0]] * 3, bool)
    sequence = jnp.array([0, 0, 1])
    for mode in masked.MODES:
        got = call(
            masked.aggregate,
            jnp.asarray(split_x),
            jnp.asarray(split_mask),
            mode,
            norm=NORM.get(mode),
            sequence=sequence,
            num_sequences=4,
        )
        assert float(got) == pytest.approx(total(x, mask, mode), rel=1e-6)


def test_refusals_name_what_is_allowed():
    mask = jnp.ones((1, 2), bool)
    with pytest.raises(ValueError, match=r"Unknown aggregation mode 'mean'.*seq-mean-token-sum-norm"):
        masked.aggregation_weights(mask, "mean")
    with pytest.raises(ValueError, match="needs norm="):
        masked.aggregation_weights(mask, "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="takes no norm="):
        masked.aggregation_weights(mask, "token-mean", norm=3)
    with pytest.raises(ValueError, match="must be positive"):
        masked.aggregation_weights(mask, "seq-mean-token-sum-norm", norm=0)
    with pytest.raises(ValueError, match="num_sequences"):
        masked.aggregation_weights(mask, "token-mean", sequence=jnp.zeros(1, int))


def test_p21_a_sequence_value_never_broadcasts_over_tokens():
    with pytest.raises(ValueError, match="must be equal"):
        masked.aggregate(jnp.ones(2), jnp.ones((2, 2), bool), "token-mean")


def test_p12_whitening_sees_the_mask_alone():
    x = jnp.array([1, 2, 3, jnp.nan, 99.0])
    mask = jnp.array([1, 1, 1, 0, 0])
    root = np.sqrt(1.5)
    np.testing.assert_allclose(call(masked.whiten, x, mask, ddof=0), [-root, 0, root, 0, 0], atol=1e-6)
    np.testing.assert_allclose(call(masked.whiten, x, mask, ddof=1), [-1, 0, 1, 0, 0], atol=1e-6)
    one = call(masked.whiten, jnp.array([5.0, jnp.inf]), jnp.array([1, 0]))
    np.testing.assert_array_equal(one, [0.0, 0.0])
    np.testing.assert_array_equal(call(masked.whiten, x, jnp.zeros(5)), np.zeros(5))


@pytest.mark.parametrize("ddof", [0, 1])
def test_whiten_equals_the_oracle_and_the_worked_example(ddof):
    x, _, _, _, mask = oracles.ragged(8)
    got = call(masked.whiten, jnp.asarray(x, jnp.float32), jnp.asarray(mask), ddof=ddof)
    np.testing.assert_allclose(got, oracles.whiten(x, mask, ddof), atol=1e-5)
    a6 = call(masked.whiten, jnp.array([0.7187, 0.546, 0.68, 0.4]), jnp.ones(4))
    np.testing.assert_allclose(a6, oracles.golden("A6.whiten"), atol=1e-5)


def test_whiten_with_counts_is_whitening_of_the_repeated_values():
    x, count = np.array([1.0, -2.0, 0.5]), np.array([3, 1, 2])
    long = np.repeat(x, count)
    want = call(masked.whiten, jnp.asarray(long), jnp.ones(6))
    got = call(masked.whiten, jnp.asarray(x), jnp.ones(3), count=jnp.asarray(count))
    np.testing.assert_allclose(np.repeat(got, count), want, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_equal_values_whiten_to_exactly_zero(dtype):
    x = jnp.full(3, 0.1).astype(dtype)
    np.testing.assert_array_equal(call(masked.whiten, x, jnp.ones(3), eps=0.0), np.zeros(3))


def test_whiten_without_shift_keeps_the_mean():
    got = call(masked.whiten, jnp.array([1.0, 3.0]), jnp.ones(2), ddof=0, shift_mean=False)
    np.testing.assert_allclose(got, [1.0, 3.0], atol=1e-6)


def test_variance_and_mean_over_an_axis():
    x, _, _, _, mask = oracles.ragged(11)
    mean, var = call(masked.masked_mean, x, mask, 1), call(masked.masked_var, x, mask, 1, ddof=1)
    for row, keep, a, b in zip(x, mask, mean, var, strict=True):
        kept = row[keep]
        assert float(a) == pytest.approx(kept.mean() if kept.size else 0.0, abs=1e-6)
        assert float(b) == pytest.approx(kept.var(ddof=1) if kept.size > 1 else 0.0, abs=1e-5)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.booleans(), min_size=12, max_size=12), st.permutations(range(3)))
def test_row_order_changes_no_aggregate(bits, order):
    mask = np.array(bits).reshape(3, 4)
    x = np.arange(12.0).reshape(3, 4)
    for mode in masked.MODES:
        assert total(x[list(order)], mask[list(order)], mode) == pytest.approx(total(x, mask, mode), rel=1e-5)
