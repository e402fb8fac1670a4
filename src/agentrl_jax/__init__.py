"""Agentic reinforcement learning for language models, as pure JAX functions.

The pieces, from the bottom up: byte strings inside XLA (``text``), environments (``envs``), codecs, models as functions
(``policy``, ``models``), the token stream (``rollout``), estimators (``advantages``, ``groups``), losses
(``losses``, ``preference``), aggregation (``masked``), algorithms as tuples of functions (``algorithms``), and a
step or a whole training run as one program (``train``).
"""

from agentrl_jax import algorithms, codecs, envs, models
from agentrl_jax.advantages import discounted_return, gae, turn_gae, vtrace
from agentrl_jax.algorithm import Algorithm, Hyper, Tools, TrainState
from agentrl_jax.branching import branch, turn_starts
from agentrl_jax.codecs.base import Codec
from agentrl_jax.envs.base import Environment, EnvSpec
from agentrl_jax.evaluate import Evaluation, make_evaluate
from agentrl_jax.groups import group_relative, leave_one_out
from agentrl_jax.kl import kl
from agentrl_jax.losses import policy_gradient, ppo_clip, value_clip, value_loss
from agentrl_jax.masked import aggregate, aggregation_weights
from agentrl_jax.metrics import finalize
from agentrl_jax.models import TransformerConfig, transformer_policy
from agentrl_jax.policy import Output, Policy
from agentrl_jax.preference import dpo
from agentrl_jax.rollout import rollout, rollout_with_stats
from agentrl_jax.sampling import log_probs, sample
from agentrl_jax.scoring import View, score, token_scores
from agentrl_jax.train import TrainConfig, make_hyper, make_init, make_step, make_train
from agentrl_jax.types import Batch, Prefix, Score, Start, Text, TimeStep, Trajectory
from agentrl_jax.update import UpdateConfig

__version__ = "0.1.0"

__all__ = [
    "Algorithm", "Batch", "Codec", "EnvSpec", "Environment", "Evaluation", "Hyper", "Output", "Policy", "Prefix",
    "Score", "Start", "Text", "TimeStep", "Tools", "TrainConfig", "TrainState", "Trajectory", "TransformerConfig",
    "UpdateConfig", "View", "aggregate", "aggregation_weights", "algorithms", "branch", "codecs", "discounted_return",
    "dpo", "envs", "finalize", "gae", "group_relative", "kl", "leave_one_out", "log_probs", "make_evaluate",
    "make_hyper", "make_init", "make_step", "make_train", "models", "policy_gradient", "ppo_clip", "rollout",
    "rollout_with_stats", "sample", "score", "token_scores", "transformer_policy", "turn_gae", "turn_starts",
    "value_clip", "value_loss", "vtrace",
]  # fmt: skip
