"""What is done to advantages afterwards: the parts that reshape what ``credit`` gave.

Each function makes a ``Part``; the formulas, with shapes, degenerate cases and sources, are those of ``group_shaping``
and ``key_tokens`` of the same name.
"""

from __future__ import annotations

import jax.numpy as jnp

from agentrl_jax import episodes, group_shaping, key_tokens, masked, stages
from agentrl_jax import metrics as metrics_lib
from agentrl_jax.algorithm import Tools
from agentrl_jax.credit import own_words, pure, turn_steps
from agentrl_jax.parts import Part
from agentrl_jax.types import Array, Batch, Metrics


def whiten(*, whiten_ddof: float = 1) -> Part:
    """``A <- (A - mean) / std`` over all loss tokens of the batch."""
    return Part("whiten", stages.whiten(whiten_ddof))


def entropy_shaped() -> Part:
    """``A <- A + min(entropy_alpha H, |A| / entropy_kappa)``: uncertain tokens learn faster, no sign flips."""

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        del tools
        adv = group_shaping.entropy_shaped(
            batch.adv, batch.extra["entropy"], alpha=hyper["entropy_alpha"], kappa=hyper["entropy_kappa"]
        )
        return batch._replace(adv=jnp.where(batch.mask, adv, 0.0)), {}

    numbers = {"entropy_alpha": 0.4, "entropy_kappa": 2.0}
    return Part("entropy_shaped", pure(function), hyper=numbers, needs=frozenset({"scores"}))


def _episode_adv(batch: Batch, tools: Tools) -> Array:
    """The advantage of an episode whose tokens all have the same, ``[N]``."""
    return masked.masked_mean(stages.sequences(batch.adv, tools), stages.sequences(batch.mask, tools), -1)


def entropy_scaled() -> Part:
    """``A <- A mean_g(H) / H``, the factor clamped to [.1, 10]; ``H`` the mean entropy of the response's tokens.

    Episodes without a word of the policy's own keep ``A``.
    """

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        del hyper
        _, ids, played = stages.episodes(batch, tools)
        own, adv = own_words(batch, tools), _episode_adv(batch, tools)
        entropy = masked.masked_mean(stages.sequences(batch.extra["entropy"], tools), own, -1)
        some = played & jnp.any(own, axis=1)
        scaled = group_shaping.entropy_scaled(adv, entropy, ids, tools.episodes, where=some)
        return stages.broadcast(batch, jnp.where(some, scaled, adv), tools), {}

    return Part("entropy_scaled", pure(function), needs=frozenset({"scores", "group"}))


def aspo_shaped() -> Part:
    """``A <- A + clip(aspo_delta (p - mean p) / mean L, -aspo_bound |A|, aspo_bound |A|)`` for correct episodes that
    call the tool, ``p`` the first token of the first call."""

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        _, ids, played = stages.episodes(batch, tools)
        calls = turn_steps(batch, tools, "tool_calls").astype(jnp.float32) > 0
        right = episodes.right(batch.traj, tools.segments)
        first = jnp.argmax(calls, axis=1)[:, None]
        turn, own = stages.sequences(batch.traj.turn, tools), own_words(batch, tools)
        # Positions count written tokens: how much the agent had said before it first called.
        said = jnp.sum(own & (turn < first), axis=1, dtype=jnp.float32)
        who = played & right & jnp.any(calls, axis=1) & jnp.any(own, axis=1)
        adv = group_shaping.aspo_shaping(
            _episode_adv(batch, tools), said, jnp.sum(own, axis=1, dtype=jnp.float32), ids, tools.episodes, where=who,
            delta=hyper["aspo_delta"], bound=hyper["aspo_bound"],
        )  # fmt: skip
        return stages.broadcast(batch, adv, tools), {}

    needs = frozenset({"group", "parts:tool_calls", "parts:success"})
    return Part("aspo_shaped", pure(function), hyper={"aspo_delta": -2.0, "aspo_bound": 0.7}, needs=needs)


def ktae_shaped(*, ktae_alpha: float = 1.0, ktae_beta: float = 1.0, ktae_top: float = 1.0) -> Part:
    """``A <- A + key value of the token``: how much its presence tells right answers of the group from wrong ones."""

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        del hyper
        _, ids, _ = stages.episodes(batch, tools)
        right = episodes.right(batch.traj, tools.segments)
        tokens = stages.sequences(batch.traj.tokens, tools)
        key = key_tokens.ktae(
            tokens, own_words(batch, tools), right, ids, tools.episodes,
            vocab_size=tools.codec.vocab_size, max_group=tools.group_size,
            special=tokens == tools.codec.end_action, alpha=ktae_alpha, beta=ktae_beta, top=ktae_top,
        )  # fmt: skip
        adv = jnp.where(batch.mask, batch.adv + key.reshape(batch.adv.shape), 0.0)
        return batch._replace(adv=adv), {"key_token": metrics_lib.masked(jnp.abs(adv - batch.adv), batch.mask)}

    return Part("ktae_shaped", pure(function), needs=frozenset({"group", "parts:success"}))
