"""Q# (arXiv 2502.20548): learn the law of the return that follows a token under the reference, then be guided by it.

    loss = sum_t w_t L(q(x, y_<=t), R),    L = -R log p - (1 - R) log(1 - p)      Bernoulli: BCE with logits
                                           L = -sum_i label_i(R) log z_i          histogram: cross-entropy
                                           L = (p - R)^2                          the ablation by squared error

over the tokens that the *reference* wrote, and the one before them: the last token of a prefix that the guided policy
rolled in and the reference continued (`launch/q_examples`). R is the return after them. The targets are samples of a
fixed law: no bootstrapping, no target network; they do not depend on `kl_coef`, which comes in when decoding
(`guidance`). V-type reads q at the token's own hidden state, Q-type at that of the token before it, one output a token.

Weights "sequence_mean" are the paper's. As 1 / length is known only later, they favour at each prefix the returns of
short continuations; "token_mean" does not. Deviations: two-hot labels beside the nearest atom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import struct

from tpu_rl import guidance, masked
from tpu_rl.errors import InputError
from tpu_rl.guidance import Support
from tpu_rl.log_probs import over_actions, tokens_at_once, vocabulary
from tpu_rl.needs import Needs, RoleSpec
from tpu_rl.types import Algorithm, Array, Experience, Metrics, Params, QExamples, Roles, Rows, Sampling, Sum

LABELS = {"nearest": guidance.nearest_atom, "two_hot": guidance.two_hot}
WEIGHTS = {"sequence_mean": masked.sequence_mean, "token_mean": masked.token_mean}


@dataclass(frozen=True)
class QSharpConfig:
    """The policy is the frozen reference; q learns."""

    q_type: Literal["v", "q"] = "v"
    """v: reads a token to score it, so `candidates` are read at each step. q: scores all that may follow at once."""
    distribution: Literal["bernoulli", "histogram", "squared_error"] = "bernoulli"
    """Of returns. Bernoulli and squared error are for returns in [0, 1]."""
    support: tuple[float, float, int] = (0.0, 1.0, 11)
    """Histogram only: lowest and highest return, and how many atoms lie between them, these included."""
    labels: Literal["nearest", "two_hot"] = "nearest"
    """Histogram only: where a return between two atoms goes."""
    prefixes: Literal["all", "single"] = "all"
    """single: of each example only its first labelled token, where the reference took over."""
    weights: Literal["sequence_mean", "token_mean"] = "sequence_mean"
    layers: int | None = None
    """q begins as so many first layers of the reference, or of `q_model`; all of them if not given."""
    q_model: str | None = None
    """Another model that q begins as, with the same tokenizer: a directory or hub id."""
    kl_coef: float = 0.1
    """eta, return a nat, of roll-ins and evaluations: the paper's, small is strong guidance."""
    candidates: int | None = 20
    """How many of the reference's likeliest tokens are scored at each step; Q-type: None is all."""
    prompts: int = 256
    """Prompts of a round of data, each with --batch.completions examples."""

    def __post_init__(self):
        low, high, atoms = self.support
        scored = self.candidates > 0 if self.candidates is not None else self.q_type == "q"
        if not (scored and self.kl_coef > 0 and low < high and atoms >= 2 and self.prompts > 0):
            fix = "kl_coef, prompts and candidates above 0 (Q-type: or all); support rising, 2 or more atoms"
            raise InputError(f"Q# cannot work with {self}", where="--algorithm", fix=fix)

    needs: ClassVar[Needs] = Needs(QExamples, smallest_group=2)
    """Prompts whose examples all earn the same are dropped."""

    @property
    def histogram(self) -> Support | None:
        """What the outputs are a histogram over; None: one logit."""
        return Support(*self.support) if self.distribution == "histogram" else None

    @property
    def roles(self) -> dict[str, RoleSpec]:
        q = RoleSpec(trainable=True, path=self.q_model, layers=self.layers)
        size = 1 if self.histogram is None else self.histogram.atoms
        q = q._replace(outputs=size) if self.q_type == "v" else q._replace(outputs_per_token=size)
        return {"policy": RoleSpec(trainable=False), "q": q}


@struct.dataclass
class Batch:
    """Leaves [M, K, R, S]; the loss sees [R, S]. `weights["q"]`: what a token counts."""

    rows: Rows
    weights: dict[str, Array]
    returns: Array


def q_sharp(config: QSharpConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Learns from QExamples."""
    del sampling
    q, support = roles["q"], config.histogram
    size = 1 if support is None else support.atoms

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        del params
        examples, layout = experience
        assert isinstance(examples, QExamples)
        learned = examples.action_mask
        if config.prefixes == "single":
            learned &= jnp.cumsum(learned, axis=-1) == 1
        weights = WEIGHTS[config.weights](learned, layout.minibatch, layout.minibatches)
        returns = layout.pack(jnp.where(learned, examples.returns, 0.0))
        return Batch(layout.rows(examples.tokens), {"q": layout.pack(weights)}, returns), state

    def outputs_of(params: Params, rows: Rows) -> Array:
        """What q says of each token: [R, S, K]."""

        def chosen(tokens: Array, h: Array) -> Array:
            every = q.logits(params, h).reshape(*tokens.shape, -1, size)
            return jnp.take_along_axis(every, tokens[..., None, None], axis=2)[:, :, 0]

        hidden = q.hidden(params, rows)
        if config.q_type == "v":
            return q.logits(params, hidden)
        return over_actions(chosen, rows, hidden, chunk_tokens=tokens_at_once(vocabulary(q, params, hidden)))

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        weights, returns = batch.weights["q"], batch.returns
        outputs = outputs_of(params, batch.rows)
        if config.distribution == "squared_error":
            losses = jnp.square(jax.nn.sigmoid(outputs[..., 0]) - returns)
        else:
            losses = guidance.negative_log_likelihood(outputs, returns, support, LABELS[config.labels])
        value = masked.total(weights * losses, weights > 0)
        mean = guidance.mean_return(outputs, support)
        middle = 0.5 if support is None else (support.low + support.high) / 2
        right = jnp.where((mean > middle) == (returns > middle), 1.0, 0.0)
        measured = {"q/loss": losses, "q/mean": mean, "q/return": returns, "q/accuracy": right}
        metrics: Metrics = {k: Sum(masked.total(weights * x, weights > 0), weights.sum()) for k, x in measured.items()}
        return value, metrics

    return Algorithm(make_batch, loss)
