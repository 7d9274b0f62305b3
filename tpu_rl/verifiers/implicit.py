"""The log-ratio of two language models as a reward of each token.

    r_t = beta [log model(y_t | x, y_<t) - log reference(y_t | x, y_<t)]

The two may have other tokenizers. Then each log-prob belongs to the characters of its own token,
and the sum up to a place where tokens of both end is the log-ratio of the text up to there. With
the model that a run starts from as the reference, and beta as its --algorithm.kl-reward-coef, the
run minimizes beta KL(policy || model): distillation from a teacher with another tokenizer.

With a model that DPO trained from the reference, r is the reward that DPO learned, token by token
(RTO, arXiv 2404.18922): PPO with `implicit` beside a reward of the whole answer is RTO. With one
that learned which answers are right, sums of r up to a token are values of the prefix (implicit
process rewards, arXiv 2412.01981). Log-probs are at temperature 1, and a completion that is cut has
no end-of-sequence token.

Deviation: RTO adds r to the KL penalty of its policy; here that is --algorithm.kl-reward-coef.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_rl import models, rewards, tokenizers
from tpu_rl.algorithm_spec import ScoreReadout
from tpu_rl.environments import text_of
from tpu_rl.losses import reward_score
from tpu_rl.losses.log_probs import token_log_probs
from tpu_rl.rewards import reward_model
from tpu_rl.rewards.reward_model import RewardModel
from tpu_rl.types import Array, PackedRows, Params, Role


def load(path: str, reference: str, beta: float) -> Callable[..., list[Any]]:
    """Return the reward function of two directories of language models, or run folders.

    Raises:
        InputError: if a model is missing, or is a reward model.
    """
    loaded = [reward_model.load_model(given) for given in (path, reference)]
    for one in loaded:
        models.require_writer(one.model, f"--reward implicit(...), {one.path}")
    roles = [models.role(one.model, lambda params: params) for one in loaded]
    params = [one.params for one in loaded]
    mesh = loaded[0].mesh
    tokenizer, other = (one.tokenizer for one in loaded)
    if tokenizers.has_same_tokens(tokenizer, models.tokenizer_directory(loaded[1].directory)):
        parts = [_Part(roles, params, (beta, -beta), tokenizer, mesh)]
    else:
        parts = [
            _Part(roles[:1], params[:1], (beta,), tokenizer, mesh),
            _Part(roles[1:], params[1:], (-beta,), other, mesh),
        ]

    def reward(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        truncated: Sequence[bool] | None = None,
        **columns: Any,
    ) -> list[Any]:
        of_parts = [part.segments(prompts, completions, columns, truncated) for part in parts]
        # A row that is too long for one of the tokenizers has no reward.
        return [
            None if None in of_row else [one for segments in of_row for one in segments]
            for of_row in zip(*of_parts, strict=True)
        ]

    return reward


class _Part:
    """Weighted log-probs of models with one tokenizer."""

    def __init__(
        self,
        roles: Sequence[Role],
        params: Sequence[Params],
        weights: Sequence[float],
        tokenizer: tokenizers.Tokenizer,
        mesh: Mesh,
    ):
        @jax.jit
        def shares(params: Sequence[Params], tokens: Array, mask: Array, ends: Array) -> Array:
            return weighted_log_probs(roles, params, weights, tokens, mask)

        self._model = RewardModel(shares, shares, ScoreReadout(), tuple(params), tokenizer, mesh)

    def segments(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: dict[str, Any],
        truncated: Sequence[bool] | None,
    ) -> list[list[rewards.Segment] | None]:
        """Return the segments of each completion: one for each token."""
        model = self._model
        decode = model.tokenizer.decode
        tokens, mask = reward_model.encode(model, prompts, completions, columns, truncated)
        with jax.set_mesh(model.mesh):
            values = reward_model.score_rows(model.shares, model.params, tokens, mask, ends=mask)
        rows = zip(tokens, mask, values, map(text_of, completions), strict=True)
        return [
            reward_model.segments_of_row(ids, actions, actions, of_row, text, decode)
            for ids, actions, of_row, text in rows
        ]


def weighted_log_probs(
    roles: Sequence[Role],
    params: Sequence[Params],
    weights: Sequence[float],
    tokens: Array,
    mask: Array,
) -> Array:
    """Return sum_i weight_i log-prob_i of each action, 0 elsewhere, [B, T]."""
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
    total = sum(
        weight * token_log_probs(role, own, rows).log_probs
        for role, own, weight in zip(roles, params, weights, strict=True)
    )
    return jnp.where(mask, total, 0.0)
