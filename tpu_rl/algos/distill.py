"""Token-level distillation: match a teacher's next-token distribution at every state.

    loss = sum_t w_t beta_t D(teacher*(.|s_t), policy(.|s_t)),    w_t = 1 / (sequences x |y|)

D is the generalized Jensen-Shannon divergence over the full vocabulary, or over the teacher's top k
tokens with all others taken together. The states s_t are constants: no gradient passes through the
sampling of completions, nor into a teacher.

    GKD           on_policy 0 to 1, beta 0 to 1                         arXiv 2306.13649
    AlignDistil   target "contrastive", adaptive, beta 1, and beta0
                  for the weights beta_t                                arXiv 2503.02832
                  (target "extrapolated" is its theorem 1; both
                  targets also with a constant alpha)

The two teachers of AlignDistil come from DPO on the same preferences, teacher_reverse with every
pair swapped. The policy starts from the same model as they did. beta_t = beta0 / alpha_t is the
KL coefficient that belongs to the teacher's alpha_t. It goes up to 1000 beta0 where the two models
agree, so the metrics split tokens and loss by how much they do.

Deviations: the authors' AlignDistil code starts at the second token of a completion and, off
policy, ends after its end. Here every token counts, the first and the end included. GKD chooses on-
or off-policy data for each batch; here every batch has that share of both. Logits of teacher and
policy alike are divided by the sampling temperature, as in TRL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax.numpy as jnp
from flax import struct

from tpu_rl import ranges
from tpu_rl.algorithm_spec import ExperienceSpec, RoleSpec
from tpu_rl.algos.roles import with_reference
from tpu_rl.losses import masked, teachers
from tpu_rl.ranges import Count, Needs, Positive, ReadOnlyWith, Share
from tpu_rl.types import (
    Algorithm,
    Array,
    Completions,
    Experience,
    Metrics,
    PackedRows,
    Params,
    Roles,
    Sampling,
    Sum,
)

DISAGREEMENT = {"low": (-1.0, 0.01), "middle": (0.01, 0.1), "high": (0.1, 3.0)}
"""Ranges of the total variation distance, (alpha_t - 0.001) / alpha. The metrics of adaptive runs
split the loss by these."""


@dataclass(frozen=True)
class DistillConfig(ranges.Checked):
    """The default is on-policy distillation with the reverse KL."""

    teacher: str
    """A model with the policy's tokenizer, of any size: a directory, a hub id or the model folder
    of a run. Or the address of a server, such as http://127.0.0.1:8000/v1, which gives the
    log-probs of the `top_k` likeliest tokens."""
    teacher_reverse: str | None = None
    """Contrastive target only: the model that learned the opposite."""
    target: Annotated[
        Literal["teacher", "extrapolated", "contrastive"],
        Needs(
            "teacher_reverse", when="contrastive", why="train it by DPO with --algorithm.reverse"
        ),
    ] = "teacher"
    """teacher: the teacher itself. extrapolated: a point on the line from the reference
    (--model.path) through the teacher. contrastive: a point beyond the teacher on the line from the
    reverse teacher. See `losses.teachers`."""
    alpha: Positive = 1.0
    """Position on that line. With `adaptive`, alpha_t = alpha x total variation distance of the two
    models + 0.001."""
    adaptive: Annotated[
        bool,
        ReadOnlyWith(
            "target", "extrapolated", "contrastive", why="it moves the target along a line"
        ),
    ] = False
    """Choose alpha_t for every token."""
    tvd_half: bool = True
    """False leaves out the 1/2 of the total variation distance, as AlignDistil's code does."""
    beta0: Annotated[
        Positive | None,
        ReadOnlyWith(
            "target", "extrapolated", "contrastive", why="it moves the target along a line"
        ),
    ] = None
    """Weigh each token's divergence by beta0 / alpha_t; all tokens alike if not given."""
    beta: Share = 1.0
    """Kind of divergence: 0 is the forward KL(teacher || policy), 1 the reverse KL(policy ||
    teacher), between them the Jensen-Shannon divergence."""
    top_k: Count | None = None
    """Compare only the target's k most likely tokens one by one, and all others together. If not
    given, compare the whole vocabulary."""
    loss_aggregation: Literal["token_mean", "sequence_mean"] = "sequence_mean"
    """Weights of the tokens: every token alike, or every completion alike (length normalization, 1
    / |y|)."""
    on_policy: Share = 1.0
    """Share of the prompts that the policy completes."""
    off_policy: Literal["data", "teacher"] = "data"
    """Source of the completions of the other prompts."""

    @property
    def served(self) -> tuple[str, int] | None:
        """The address of a teacher by HTTP, and `top_k`."""
        is_served = self.teacher.startswith(("http://", "https://"))
        return (self.teacher, self.top_k or 0) if is_served else None

    @property
    def experience(self) -> ExperienceSpec:
        spec = ExperienceSpec("completions", on_policy=self.on_policy, positive_temperature=True)
        if self.served is not None:
            spec = spec._replace(served=self.served, sampled_by="policy")
            if self.on_policy == 1:
                return spec
        # Beyond the teacher, its texts are not what the policy should write.
        imitates = "teacher" if self.target == "teacher" and self.served is None else None
        if self.off_policy == "teacher" or self.on_policy == 1:
            return spec._replace(sampled_by="teacher", imitates=imitates)
        columns = ("prompt", "completion") if self.on_policy else ("messages",)
        return spec._replace(columns=columns, sampled_by=None, imitates=imitates and "data")

    @property
    def roles(self) -> dict[str, RoleSpec]:
        roles = {"policy": RoleSpec(trainable=True)}
        if self.served is None:
            roles["teacher"] = RoleSpec(trainable=False, path=self.teacher)
        if self.target == "contrastive":
            roles["teacher_reverse"] = RoleSpec(trainable=False, path=self.teacher_reverse)
        return with_reference(roles, needed=self.target == "extrapolated")


@struct.dataclass
class Batch:
    """Leaves are [M, K, R, S]; the loss sees [R, S]."""

    rows: PackedRows
    weights: dict[str, Array]
    """"policy": the weights of the tokens."""
    on_policy: Array
    """bool: True if the policy sampled the token's completion."""
    teacher: list[list[Array]]
    """Ids and log-probs of a served teacher's likeliest tokens, an array for each rank."""


def distill(config: DistillConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build distillation. It learns from Completions of any origin."""
    teachers.require_distributions(sampling)
    teacher = teachers.compose(config.target, config.alpha, config.adaptive, config.tvd_half)
    weighting = masked.weighting(config.loss_aggregation)

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        completions, layout = experience
        assert isinstance(completions, Completions)
        mask = completions.action_mask
        weights = weighting(mask, layout.minibatch, layout.minibatches)
        batch = Batch(
            rows=layout.rows(completions.tokens),
            weights={"policy": layout.pack(weights)},
            on_policy=layout.pack(mask & completions.on_policy[:, None]),
            teacher=[
                [layout.pack(values[..., rank]) for rank in range(values.shape[-1])]
                for values in (completions.teacher_ids, completions.teacher_log_probs)
                if values is not None
            ],
        )
        return batch, state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        if batch.teacher:
            ids, log_probs = (jnp.stack(ranks, -1) for ranks in batch.teacher)
            comparison = teachers.compare_with_top(
                roles["policy"], params, batch.rows, ids, log_probs, config.beta
            )
        else:
            comparison = teachers.compare(
                roles,
                params,
                batch.rows,
                teacher,
                config.beta,
                temperature=sampling.temperature,
                top_k=config.top_k,
            )
        weights = batch.weights["policy"]
        mask = weights > 0
        beta = 1.0
        if config.beta0 is not None:
            # Slots that are not learned have alpha 0.
            beta = config.beta0 / jnp.where(mask, comparison.alpha, 1.0)
        losses = jnp.where(mask, weights * beta * comparison.divergence, 0.0)
        value = losses.sum()
        metrics: Metrics = {
            "distill/loss": Sum(value, weights.sum()),
            "distill/divergence": masked.average(comparison.divergence, mask),
            "policy/entropy": masked.average(comparison.entropy, mask),
        }
        if 0 < config.on_policy < 1:
            metrics["distill/divergence_on_policy"] = masked.average(
                comparison.divergence, mask & batch.on_policy
            )
            metrics["distill/divergence_off_policy"] = masked.average(
                comparison.divergence, mask & ~batch.on_policy
            )
        if config.adaptive:
            metrics["distill/alpha"] = masked.average(comparison.alpha, mask)
            distance = (comparison.alpha - teachers.LEAST_ALPHA) / config.alpha
            for name, (low, high) in DISAGREEMENT.items():
                part = (distance > low) & (distance <= high)
                metrics[f"distill/tokens_{name}"] = masked.average(part.astype(jnp.float32), mask)
                metrics[f"distill/loss_{name}"] = Sum(masked.total(losses, part), value)
        return value, metrics

    return Algorithm(make_batch, loss)
