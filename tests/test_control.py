"""Predicates that stay scalar under vmap, and the loops and branches built on them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax import control


def test_any_and_max_are_reductions():
    assert bool(control.any_(jnp.asarray([False, True]))) and not bool(control.any_(jnp.zeros((2, 2), bool)))
    assert int(control.max_(jnp.asarray([[3, 9], [-1, 4]]))) == 9


def test_under_vmap_the_answer_is_one_for_all():
    x = jnp.asarray([[[1, 0], [0, 0]], [[0, 0], [0, 0]]])
    for axes, once in ((1, jax.vmap), (2, lambda f: jax.vmap(jax.vmap(f)))):
        some, most = once(lambda v: (control.any_(v > 0), control.max_(v)))(x)
        assert some.shape == most.shape == x.shape[:axes] and some.all() and np.all(most == 1)


def test_vmap_of_a_loop_keeps_its_predicate_scalar_and_stops_each_member_alone():
    def count(limit):
        def body(c):
            n, limit = c
            return jnp.where(n < limit, n + 1, n), limit

        return control.while_any(lambda c: c[0] < c[1], body, (jnp.int32(0), limit))[0]

    limits = jnp.asarray([3, 0, 7], jnp.int32)
    assert jax.vmap(count)(limits).tolist() == [3, 0, 7]
    loops = [e for e in jax.make_jaxpr(jax.vmap(count))(limits).jaxpr.eqns if e.primitive.name == "while"]
    assert len(loops) == 1 and loops[0].params["cond_jaxpr"].jaxpr.outvars[0].aval.shape == ()


@pytest.mark.parametrize("needed, index", [([0], 0), ([4], 0), ([5], 1), ([3, 8], 1), ([9], 2), ([16], 2), ([99], 2)])
def test_the_smallest_width_that_holds_all(needed, index):
    assert int(control.width_index((4, 8, 16), jnp.asarray(needed, jnp.int32))) == index
    assert int(control.width_index((16,), jnp.asarray(needed, jnp.int32))) == 0


def test_widths_under_vmap_are_one_for_all_and_the_switch_stays_a_branch():
    def f(needed):
        branches = [lambda w=w: jnp.float32(w) for w in (4, 8, 16)]
        return jax.lax.switch(control.width_index((4, 8, 16), needed), branches)

    needed = jnp.asarray([[1], [6], [2]], jnp.int32)
    assert jax.vmap(f)(needed).tolist() == [8, 8, 8]
    names = [e.primitive.name for e in jax.make_jaxpr(jax.vmap(f))(needed).jaxpr.eqns]
    assert "cond" in names and "select_n" not in names
