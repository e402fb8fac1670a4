"""Who earned it: the parts that give every written token its advantage.

Each function makes a ``Part``. Static choices are its keywords; numbers it reads are the part's ``hyper``. The
estimators themselves, with shapes, degenerate cases and sources, are those of ``advantages``, ``groups`` and
``group_shaping`` of the same name; a part applies one to the episodes of a batch and fills
``Batch.adv`` ``[B, T]`` (with a critic ``Batch.target`` too).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from agentrl_jax import advantages, episodes, group_shaping, groups, scoring, stages
from agentrl_jax import metrics as metrics_lib
from agentrl_jax.algorithm import Shape, Tools
from agentrl_jax.checks import check_above, check_choice
from agentrl_jax.parts import Part
from agentrl_jax.types import Array, Batch, Metrics, PyTree

Pure = Callable[[Batch, Tools, dict[str, Array]], tuple[Batch, Metrics]]


def pure(function: Pure) -> stages.Stage:
    """A stage out of ``(Batch, Tools, hyper) -> (Batch, Metrics)``, which keeps nothing and draws nothing."""

    def stage(
        memory: PyTree, batch: Batch, tools: Tools, hyper: dict[str, Array], key: Array
    ) -> tuple[PyTree, Batch, Metrics]:
        del key
        batch, metrics = function(batch, tools, hyper)
        return memory, batch, metrics

    return stage


def turn_rewards(batch: Batch, tools: Tools) -> Array:
    """What each turn of an episode earned, ``[N, K]``: ``traj.reward`` summed by turn, so nothing of it is lost."""
    traj, turns = batch.traj, tools.max_turns
    turn = jnp.clip(stages.sequences(traj.turn, tools), 0, turns - 1)
    add = jax.vmap(lambda r, t: jax.ops.segment_sum(r, t, turns))
    return add(stages.sequences(traj.reward, tools), turn)


def turn_steps(batch: Batch, tools: Tools, name: str) -> Array:
    """``traj.steps[name]`` of an episode, ``[N, K]``; its rows each hold the turns they played."""
    x = batch.traj.steps[name]
    return jnp.sum(x.reshape(-1, tools.segments, x.shape[-1]), axis=1, dtype=x.dtype)


def played_turns(batch: Batch, tools: Tools) -> Array:
    """Turns in which the agent wrote something, ``bool[N, K]``: also one that its environment never saw."""
    traj = batch.traj
    turn = jnp.where(traj.mask, traj.turn, -1)
    wrote = jnp.any(turn[..., None] == jnp.arange(tools.max_turns, dtype=turn.dtype), axis=1)
    return jnp.any(wrote.reshape(-1, tools.segments, tools.max_turns), axis=1)


def spread(batch: Batch, adv: Array, tools: Tools) -> Batch:
    """Gives the loss tokens of every turn its advantage: ``adv`` ``[N, K]``."""
    rows = stages.episode_rows(adv, tools)
    return batch._replace(adv=jax.vmap(advantages.spread_turns)(rows, batch.traj.turn, batch.mask))


def own_words(batch: Batch, tools: Tools) -> Array:
    """Tokens that the policy wrote itself, ``bool[N, segments * T]``, whether or not a filter dropped them."""
    return stages.sequences(batch.traj.mask & ~batch.traj.expert, tools)


def written(batch: Batch, tools: Tools) -> Array:
    """How many tokens of every episode the policy wrote itself, dropped or not: ``float32[N]``."""
    return jnp.sum(own_words(batch, tools), axis=1, dtype=jnp.float32)


def _relative(name: str, estimator: Callable[..., Array], needs: frozenset[str] = frozenset(), **options) -> Part:
    return Part(name, stages.group_advantage(estimator, **options), needs=needs | {"group"})


def group(*, scale: str = "std", ddof: float = 1, eps: float = 1e-6) -> Part:
    """``A = (R - mean_g) / (std_g + eps)``; ``scale`` "none", "batch" and "batch-centred" divide by other things."""
    return _relative("group", groups.group_relative, scale=scale, ddof=ddof, eps=eps)


def own_group(*, scale: str = "std", ddof: float = 1, eps: float = 1e-6) -> Part:
    """``A = (R - mean) / (std + eps)``, mean and deviation over the policy's own episodes of the group alone; where
    these are all alike, ``R - mean``."""
    groups.group_relative(jnp.zeros(1), jnp.zeros(1, jnp.int32), 1, scale=scale, ddof=ddof, eps=eps)

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        del hyper
        ret, ids, played = stages.episodes(batch, tools)
        own = ~jnp.any(stages.sequences(batch.traj.expert, tools), axis=1)
        adv = groups.group_relative(
            ret, ids, tools.episodes, scale=scale, ddof=ddof, eps=eps, where=played, statistics=own
        )
        return stages.broadcast(batch, adv, tools), stages.zero_variance(batch, tools)

    return Part("own_group", pure(function), needs=frozenset({"group"}))


def leave_one_out() -> Part:
    """``A = R - mean of the others of the group``."""
    return _relative("leave_one_out", groups.leave_one_out)


def pass_at_k(*, k: int = 4) -> Part:
    """The analytic advantage of pass@k, from binary rewards."""
    check_above(0, k=k)
    return _relative("pass_at_k", groups.pass_at_k_advantage, frozenset({f"group>={k}"}), k=k)


def max_at_k(*, k: int = 4, subset_baseline: bool = True) -> Part:
    """Unbiased weights for the expected best of ``k``, any rewards."""
    check_above(0, k=k)
    return _relative("max_at_k", groups.max_at_k_advantage, frozenset({f"group>={k}"}), k=k, baseline=subset_baseline)


def best_gap(*, ddof: float = 1, eps: float = 1e-6) -> Part:
    """The best of the group gets its lead over the second, the others 0."""
    return _relative("best_gap", groups.best_gap, ddof=ddof, eps=eps)


def gpg() -> Part:
    """``A = alpha (R - mean_g)``, ``alpha`` making up for groups without a difference."""
    return _relative("gpg", groups.gpg)


def length_weighted() -> Part:
    """``A = R - sum_g len R / sum_g len``, lengths of what the policy wrote itself."""

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        del hyper
        ret, ids, played = stages.episodes(batch, tools)
        adv = groups.length_weighted(ret, written(batch, tools), ids, tools.episodes, where=played)
        return stages.broadcast(batch, adv, tools), stages.zero_variance(batch, tools)

    return Part("length_weighted", pure(function), needs=frozenset({"group"}))


def gdpo(*, parts: tuple[str, ...] = ("success", "malformed"), weights: tuple[float, ...] = (1.0, -0.1)) -> Part:
    """Each reward part normalised in its group by itself, summed with ``weights``, normalised over the batch."""
    if len(parts) != len(weights) or not parts:
        raise ValueError(f"gdpo needs as many weights as parts, got {len(weights)} and {len(parts)}")

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        del hyper
        _, ids, played = stages.episodes(batch, tools)
        each = [episodes.total(batch.traj, name, tools.segments) for name in parts]
        adv = groups.gdpo(jnp.stack(each, 1), jnp.asarray(weights), ids, tools.episodes, where=played)
        return stages.broadcast(batch, adv, tools), stages.zero_variance(batch, tools)

    return Part("gdpo", pure(function), needs=frozenset({"group", *(f"parts:{name}" for name in parts)}))


def gigpo(*, scale: str = "none", episode_statistics: str = "episode") -> Part:
    """``A = A_episode + omega A_step``; turns are compared with those of the group at the same anchor."""
    check_choice("scale", scale, ("none", "std"))
    check_choice("episode_statistics", episode_statistics, ("episode", "step"))

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        _, ids, _ = stages.episodes(batch, tools)
        anchor, played = turn_steps(batch, tools, "anchor"), played_turns(batch, tools)
        adv = group_shaping.gigpo(
            turn_rewards(batch, tools), anchor.astype(jnp.int32), played, ids, tools.episodes,
            discount=hyper["step_discount"], omega=hyper["omega"], scale=scale, episode_statistics=episode_statistics,
        )  # fmt: skip
        return spread(batch, adv, tools), stages.zero_variance(batch, tools) | _anchored(anchor, played, ids)

    return Part("gigpo", pure(function), hyper={"step_discount": 0.95, "omega": 1.0}, needs=frozenset({"group"}))


def _anchored(anchor: Array, played: Array, ids: Array) -> Metrics:
    """Share of turns that have another of their group at the same anchor: without any the step part is silent."""
    rows = jnp.broadcast_to(ids[:, None], anchor.shape).ravel()
    where = played.ravel()
    same = group_shaping.dense_ids(rows, anchor.astype(jnp.int32).ravel(), where=where)
    who = groups.members(same, same.shape[0], where)
    return {"anchored": metrics_lib.masked((who.size > 1).astype(jnp.float32), where)}


def turn_relative(*, part: str = "tool_calls") -> Part:
    """``A_k = A_outcome + turn_coef A_turn_k`` before the last turn, ``A_outcome`` in it; ``part`` is the turn's
    reward."""

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        ret, ids, played = stages.episodes(batch, tools)
        adv = group_shaping.turn_relative(
            turn_steps(batch, tools, part).astype(jnp.float32), ret, played_turns(batch, tools), ids, tools.episodes,
            coef=hyper["turn_coef"], where=played,
        )  # fmt: skip
        return spread(batch, adv, tools), stages.zero_variance(batch, tools)

    return Part("turn_relative", pure(function), hyper={"turn_coef": 1.0}, needs=frozenset({"group", f"parts:{part}"}))


def process_relative() -> Part:
    """``A_k = sum_{j >= k} (r_j - mean) / (std + eps)`` with mean and deviation over all turns of the group."""

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        del hyper
        _, ids, _ = stages.episodes(batch, tools)
        adv = group_shaping.process_relative(
            turn_rewards(batch, tools), played_turns(batch, tools), ids, tools.episodes
        )
        return spread(batch, adv, tools), stages.zero_variance(batch, tools)

    return Part("process_relative", pure(function), needs=frozenset({"group"}))


def tag_relative(*, tag: str, part: str, scale: str = "none") -> Part:
    """``A_k = A_episode + tag_coef A_tag``; the reward ``part`` of a turn is compared with those of the group's turns
    under the same ``tag``; both are parts of the environment."""
    check_choice("scale", scale, ("none", "std"))

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        ret, ids, _ = stages.episodes(batch, tools)
        tags, paid = turn_steps(batch, tools, tag).astype(jnp.int32), turn_steps(batch, tools, part)
        adv = group_shaping.tag_relative(
            paid.astype(jnp.float32), ret, tags, played_turns(batch, tools), ids, tools.episodes,
            coef=hyper["tag_coef"], scale=scale,
        )  # fmt: skip
        return spread(batch, adv, tools), stages.zero_variance(batch, tools)

    needs = frozenset({"group", f"parts:{tag}", f"parts:{part}"})
    return Part("tag_relative", pure(function), hyper={"tag_coef": 1.0}, needs=needs)


def optimal_token() -> Part:
    """``A_t = G_t - sum_g G_t W_t / sum_g W_t`` at the t-th written token; ``W_t`` sums ``1 - 2 pi + sum_v pi_v^2`` up
    to there."""

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        del hyper
        _, ids, played = stages.episodes(batch, tools)
        score = tools.score(scoring.View(statistic=scoring.collision), batch)
        energy = 1.0 - 2.0 * jnp.exp(score.logp) + score.entropy
        rows = (batch.traj.reward, energy, batch.traj.mask)
        reward, energy, mask = (stages.sequences(x, tools) for x in rows)
        ret = jax.vmap(lambda r, m: advantages.discounted_return(r, m, discount=1.0))(reward, mask)
        adv = group_shaping.optimal_token(ret, energy, mask, ids, tools.episodes, where=played)
        adv = jnp.where(batch.mask, adv.reshape(batch.adv.shape), 0.0)
        return batch._replace(adv=adv), stages.zero_variance(batch, tools)

    return Part("optimal_token", pure(function), needs=frozenset({"group"}))


def returns(*, baseline: str = "ema") -> Part:
    """``A_t = G_t - b``: the discounted return to go against a running mean of past returns, or 0."""

    def init(key: Array, shape: Shape) -> PyTree:
        del key, shape
        return (jnp.zeros(()), jnp.zeros(())) if baseline == "ema" else ()

    return Part("returns", stages.return_to_go(baseline), hyper={"discount": 1.0}, init=init)


def ones() -> Part:
    """``A = 1`` on every kept token: supervised learning on what the filters leave."""

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        del tools, hyper
        return batch._replace(adv=jnp.where(batch.mask, 1.0, 0.0)), {}

    return Part("ones", pure(function))


_CRITIC = frozenset({"critic", "scores"})


def gae(*, lambda_critic: float | None = None) -> Part:
    """GAE over written tokens.

    With ``lambda_critic`` the critic's targets have a lambda of their own, a number of the algorithm then; 1 makes them
    returns to go. Source: Yuan et al., VC-PPO, 2025, arXiv 2503.01491 (.95 for the policy, 1 for the critic).

    Raises:
      ValueError: a ``lambda_critic`` outside [0, 1].
    """
    numbers = {"discount": 1.0, "lambda_": 0.95}
    if lambda_critic is None:
        return Part("gae", stages.gae(), hyper=numbers, needs=_CRITIC)
    if not 0 <= lambda_critic <= 1:
        raise ValueError(f"lambda_critic must be in [0, 1], got {lambda_critic}")
    numbers["lambda_critic"] = lambda_critic
    return Part("gae", stages.gae(decoupled=True), hyper=numbers, needs=_CRITIC)


def _with_critic(
    name: str, estimate: Callable[..., tuple[Array, Array]], numbers: dict[str, float], *, ends: bool = False
) -> Part:
    """A part out of ``estimate(reward, value, mask, turn, logp_old, logp, length, bootstrap, hyper)`` of one
    episode."""

    def function(batch: Batch, tools: Tools, hyper: dict[str, Array]) -> tuple[Batch, Metrics]:
        traj = batch.traj
        bootstrap = jnp.where(traj.truncated, batch.bootstrap, 0.0).reshape(-1, tools.segments).sum(axis=1)
        rows = (traj.reward, batch.value, traj.mask, traj.turn, batch.logp_old, traj.logp)
        data = [stages.sequences(x, tools) for x in rows]
        adv, target = jax.vmap(lambda b, *x: estimate(*x, bootstrap=b, hyper=hyper))(bootstrap, *data)
        adv, target = adv.reshape(batch.adv.shape), target.reshape(batch.adv.shape)
        batch, trained = batch._replace(adv=adv, target=target), batch.mask
        if ends:
            last = jax.vmap(advantages.turn_ends)(traj.mask, traj.turn)
            batch, trained = batch._replace(extra={**batch.extra, "value_mask": last}), trained & last
        explained = stages.explained_variance(target, batch.value, trained)
        return batch, {"explained_variance": metrics_lib.scalar(explained)}

    return Part(name, pure(function), hyper=numbers, needs=_CRITIC)


def turn_gae() -> Part:
    """GAE over turns: every token of a turn gets the turn's advantage, and the critic is trained at turn ends."""

    def estimate(reward, value, mask, turn, logp_old, logp, *, bootstrap, hyper):
        del logp_old, logp
        return advantages.turn_gae(
            reward, value, mask, turn, discount=hyper["turn_discount"], lambda_=hyper["lambda_"], bootstrap=bootstrap
        )

    return _with_critic("turn_gae", estimate, {"turn_discount": 1.0, "lambda_": 1.0}, ends=True)


def bilevel_gae() -> Part:
    """GAE over turns, then over the tokens of each turn."""

    def estimate(reward, value, mask, turn, logp_old, logp, *, bootstrap, hyper):
        del logp_old, logp
        return advantages.turn_gae(
            reward, value, mask, turn, discount=hyper["turn_discount"], lambda_=hyper["lambda_"],
            token_discount=hyper["discount"], token_lambda=hyper["token_lambda"], bilevel=True, bootstrap=bootstrap,
        )  # fmt: skip

    numbers = {"turn_discount": 0.95, "lambda_": 1.0, "discount": 1.0, "token_lambda": 1.0}
    return _with_critic("bilevel_gae", estimate, numbers)


def vapo_gae() -> Part:
    """Two passes: targets with ``lambda = 1``, advantages with ``lambda = 1 - 1 / (alpha l)`` of the episode's length
    ``l``, clamped to [0, 1]."""

    def estimate(reward, value, mask, turn, logp_old, logp, *, bootstrap, hyper):
        del turn, logp_old, logp
        policy = advantages.length_adaptive_lambda(jnp.sum(mask), alpha=hyper["length_alpha"])
        return advantages.decoupled_gae(
            reward, value, mask, discount=hyper["discount"], lambda_policy=policy, bootstrap=bootstrap
        )

    return _with_critic("vapo_gae", estimate, {"discount": 1.0, "length_alpha": 0.05})


def vtrace() -> Part:
    """V-trace: values and advantages corrected for a behaviour policy that lags behind."""

    def estimate(reward, value, mask, turn, logp_old, logp, *, bootstrap, hyper):
        del turn
        return advantages.vtrace(
            reward, value, logp_old, logp, mask, discount=hyper["discount"], lambda_=hyper["lambda_"],
            rho_clip=hyper["rho_clip"], pg_rho_clip=hyper["rho_clip"], bootstrap=bootstrap,
        )  # fmt: skip

    return _with_critic("vtrace", estimate, {"discount": 1.0, "lambda_": 1.0, "rho_clip": 1.0})
