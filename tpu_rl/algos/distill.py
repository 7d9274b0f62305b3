"""Token-level distillation: the policy's whole next-token distribution is drawn to a teacher's, state by state.

    loss = sum_t w_t beta_t D(teacher*(.|s_t), policy(.|s_t)),    w_t = 1 / (sequences x |y|)

D is the generalised Jensen-Shannon divergence over the full vocabulary, or over the teacher's top k tokens and the rest
as one. States s_t are constants: no gradient passes through the sampling of completions, nor into any teacher.

    GKD           on_policy 0 to 1, beta 0 to 1                                             arXiv 2306.13649
    AlignDistil   target "contrastive", adaptive, beta 1, and beta0 for its weights         arXiv 2503.02832
                  (target "extrapolated" is its theorem 1; both also with a constant alpha)

AlignDistil: teacher and teacher_reverse come from DPO on the same preferences, the latter with every pair swapped; the
policy starts as the model that they started as. beta_t = beta0 / alpha_t is the KL coefficient that belongs to the
teacher's alpha_t, up to 1000 beta0 where the two models agree: metrics split tokens and loss by how much they do.

Deviations. The authors' AlignDistil code starts at the second token of a completion and, off policy, ends behind its
end; here every token counts, the first and the end included. GKD draws on- or off-policy data batch by batch; here
every batch holds the share. Logits of teacher and policy alike are divided by the sampling temperature, as in TRL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from flax import struct

from tpu_rl import masked, teachers
from tpu_rl.errors import InputError
from tpu_rl.needs import Needs, RoleSpec
from tpu_rl.types import Algorithm, Array, Completions, Experience, Metrics, Params, Roles, Rows, Sampling, Sum

WEIGHTS = {"token_mean": masked.token_mean, "sequence_mean": masked.sequence_mean}
DISAGREEMENT = {"low": (-1.0, 0.01), "middle": (0.01, 0.1), "high": (0.1, 3.0)}
"""Total variation distances, (alpha_t - 0.001) / alpha, by which adaptive runs split the loss in metrics."""


@dataclass(frozen=True)
class DistillConfig:
    teacher: str
    """A model with the policy's tokenizer, of any size: a directory, a hub id or the model folder of a run."""
    teacher_reverse: str | None = None
    """Contrastive target only: the model that learned the opposite."""
    target: Literal["teacher", "extrapolated", "contrastive"] = "teacher"
    """The teacher as it is; or a point on the line from the reference (--model.path) to it; or beyond it, on the line
    from the reverse teacher (see `teachers`)."""
    alpha: float = 1.0
    """How far on that line; adaptive: alpha_t = alpha x total variation distance of the two models + 0.001."""
    adaptive: bool = False
    tvd_half: bool = True
    """False: total variation without its 1/2, as in AlignDistil's code."""
    beta0: float | None = None
    """Weighs each token's divergence by beta0 / alpha_t; None: all tokens alike."""
    beta: float = 1.0
    """Of the divergence: 0 forward KL(teacher || policy), 1 reverse KL(policy || teacher), between: Jensen-Shannon."""
    top_k: int | None = None
    """Tells apart only the target's k likeliest tokens; None: the whole vocabulary."""
    weights: Literal["token_mean", "sequence_mean"] = "sequence_mean"
    """sequence_mean: every completion counts the same, its tokens share (length normalisation, 1 / |y|)."""
    on_policy: float = 1.0
    """Share of the prompts that the policy itself completes."""
    off_policy: Literal["data", "teacher"] = "data"
    """Who completes the others: the data, or the teacher."""

    def __post_init__(self):
        if not (0 <= self.beta <= 1 and 0 <= self.on_policy <= 1):
            found = f"beta {self.beta} or on_policy {self.on_policy} is not from 0 to 1"
            raise InputError(found, where="--algorithm.beta, --algorithm.on-policy")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k is {self.top_k}", where="--algorithm.top-k", fix="use 1 or more, e.g. 32")
        if self.target == "contrastive" and self.teacher_reverse is None:
            fix = "train it by reverse DPO and give its folder"
            raise InputError("a contrast needs a second model", where="--algorithm.teacher-reverse", fix=fix)
        if self.target == "teacher" and (self.adaptive or self.beta0 is not None):
            fix = "choose --algorithm.target extrapolated or contrastive"
            raise InputError("adaptive and beta0 are for a target on a line", where="--algorithm.target", fix=fix)
        if min(self.alpha, 1.0 if self.beta0 is None else self.beta0) <= 0:
            raise InputError("alpha and beta0 are above 0", where="--algorithm.alpha, --algorithm.beta0")

    @property
    def needs(self) -> Needs:
        if self.off_policy == "teacher" or self.on_policy == 1:
            return Needs(Completions, sampled_by="teacher", on_policy=self.on_policy)
        columns = ("prompt", "completion") if self.on_policy else ("messages",)
        return Needs(Completions, columns, sampled_by=None, on_policy=self.on_policy)

    @property
    def roles(self) -> dict[str, RoleSpec]:
        roles = {"policy": RoleSpec(trainable=True), "teacher": RoleSpec(trainable=False, path=self.teacher)}
        if self.target == "contrastive":
            roles["teacher_reverse"] = RoleSpec(trainable=False, path=self.teacher_reverse)
        return roles | ({"reference": RoleSpec(trainable=False)} if self.target == "extrapolated" else {})


@struct.dataclass
class Batch:
    rows: Rows
    weights: dict[str, Array]
    """"policy": [.., R, S]."""
    on_policy: Array
    """[.., R, S] bool."""


def distill(config: DistillConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Learns from Completions, whoever wrote them."""
    if sampling.temperature <= 0:
        raise InputError(
            "distributions are compared at a temperature above 0", where="--sampling.temperature", fix="use 1.0"
        )
    teacher = teachers.compose(config.target, config.alpha, config.adaptive, config.tvd_half)

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        del params
        data, layout = experience
        assert isinstance(data, Completions)
        weights = WEIGHTS[config.weights](data.action_mask, layout.minibatch, layout.minibatches)
        on_policy = layout.pack(data.action_mask & data.on_policy[:, None])
        return Batch(layout.rows(data.tokens), {"policy": layout.pack(weights)}, on_policy), state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        how = {"temperature": sampling.temperature, "top_k": config.top_k}
        found = teachers.compare(roles, params, batch.rows, teacher, config.beta, **how)
        weights, mask = batch.weights["policy"], batch.weights["policy"] > 0
        beta = 1.0 if config.beta0 is None else config.beta0 / found.alpha
        losses = jnp.where(mask, weights * beta * found.divergence, 0.0)

        def average(values: Array, tokens: Array) -> Sum:
            return Sum(masked.total(values, tokens), tokens.sum().astype(jnp.float32))

        metrics: Metrics = {
            "distill/loss": Sum(losses.sum(), weights.sum()),
            "distill/divergence": average(found.divergence, mask),
            "policy/entropy": average(found.entropy, mask),
        }
        if 0 < config.on_policy < 1:
            metrics["distill/divergence_on_policy"] = average(found.divergence, mask & batch.on_policy)
            metrics["distill/divergence_off_policy"] = average(found.divergence, mask & ~batch.on_policy)
        if config.adaptive:
            distance = (found.alpha - teachers.LEAST_ALPHA) / config.alpha
            metrics["distill/alpha"] = average(found.alpha, mask)
            for name, (low, high) in DISAGREEMENT.items():
                part = (distance > low) & (distance <= high)
                metrics[f"distill/tokens_{name}"] = average(part.astype(jnp.float32), mask)
                metrics[f"distill/loss_{name}"] = Sum(masked.total(losses, part), losses.sum())
        return losses.sum(), metrics

    return Algorithm(make_batch, loss)
