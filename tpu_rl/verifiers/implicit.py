"""The log-ratio of two language models as a reward of each token.

    r_t = beta [log model(y_t | x, y_<t) - log reference(y_t | x, y_<t)]

With a model that DPO trained from the reference, r is the reward that DPO learned, token by token
(RTO, arXiv 2404.18922): PPO with `implicit` beside a reward of the whole answer is RTO. With one
that learned which answers are right, sums of r up to a token are values of the prefix (implicit
process rewards, arXiv 2412.01981). Both are models of any tokenizer; log-probs are at temperature
1.

Deviation: RTO adds r to the KL penalty of its policy; here that is --algorithm.kl-reward-coef.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpu_rl import models, tokenizers
from tpu_rl.algorithm_spec import ScoreReadout
from tpu_rl.environments import text_of
from tpu_rl.errors import InputError
from tpu_rl.losses import reward_score
from tpu_rl.losses.log_probs import token_log_probs
from tpu_rl.rewards import reward_model
from tpu_rl.rewards.reward_model import RewardModel
from tpu_rl.train import sharding
from tpu_rl.types import Array, PackedRows, Params, Role


def load(path: str, reference: str, beta: float) -> Callable[..., list[Any]]:
    """Return the reward function of two directories of language models, or run folders.

    Raises:
        InputError: if a model is missing, is a reward model, or the two have other tokens.
    """
    mesh = sharding.make_mesh(devices=jax.local_devices()[:1])
    directories = [reward_model.directory_of(given) for given in (path, reference)]
    with jax.set_mesh(mesh):
        loaded = [models.load(directory, mesh=mesh) for directory in directories]
    for given, (model, _) in zip((path, reference), loaded, strict=True):
        if model.config.num_outputs is not None:
            raise InputError(
                "not a language model: it has a head",
                where=f"--reward implicit(...), {given}",
                why="the reward is a ratio of probabilities of tokens",
                fix="give a model that writes text; for a reward model use its folder as --reward",
            )
    tokenizer = tokenizers.load(models.tokenizer_directory(directories[0]))
    tokenizers.require_same_tokens(tokenizer, directories[1], "the reference of implicit(...)")
    roles = [models.role(model, lambda params: params) for model, _ in loaded]

    @jax.jit
    def shares(params: Sequence[Params], tokens: Array, mask: Array, ends: Array) -> Array:
        del ends
        return log_ratios(roles, params, tokens, mask, beta)

    both = tuple(params for _, params in loaded)
    whole = RewardModel(shares, shares, ScoreReadout(), both, tokenizer, mesh)

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[Any]:
        tokens, mask = reward_model.encode(whole, prompts, completions, columns)
        with jax.set_mesh(mesh):
            values = reward_model.score_rows(shares, both, tokens, mask, ends=mask)
        rows = zip(tokens, mask, values, map(text_of, completions), strict=True)
        return [
            reward_model.segments_of_row(ids, actions, actions, of_row, text, tokenizer.decode)
            for ids, actions, of_row, text in rows
        ]

    return reward


def log_ratios(
    roles: Sequence[Role], params: Sequence[Params], tokens: Array, mask: Array, beta: float
) -> Array:
    """Return beta [log first - log second] of each action, 0 elsewhere, [B, T]."""
    columns = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    last = jnp.argmax(reward_score.last_actions(mask), axis=1)[:, None]
    rows = PackedRows(
        tokens=tokens,
        positions=columns,
        segment_ids=(columns <= last).astype(jnp.int32),
        branch_ids=jnp.zeros_like(columns),
        sequence_ids=mask.astype(jnp.int32),
        previous=jnp.maximum(columns - 1, 0),
    )
    first, second = (
        token_log_probs(role, own, rows).log_probs for role, own in zip(roles, params, strict=True)
    )
    return jnp.where(mask, beta * (first - second), 0.0)
