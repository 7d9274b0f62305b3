"""Q# (arXiv 2502.20548): learn the distribution of the return that follows a token under the
reference, and guide the reference by it.

    loss = sum_t w_t L(q(x, y_<=t), R)

    Bernoulli       L = -R log p - (1 - R) log(1 - p)       binary cross-entropy with logits
    histogram       L = -sum_i label_i(R) log z_i           cross-entropy
    squared_error   L = (p - R)^2                           the paper's ablation

    plus, with `next_token_coef` c,  -c sum_k sum_t v_t log p_k(y_t | x, y_<=t-k)

The sum is over the tokens that the *reference* wrote, and the one before them: the last token of a
prefix that the guided policy wrote and the reference continued (`experience.q_examples`). R is the
return after them. The targets are samples of a fixed distribution, so there is no bootstrapping and
no target network. They do not depend on `kl_coef`, which comes in when decoding (see
`losses.return_distributions`). V-type reads q at the token's own hidden state; Q-type reads it at
the state of the token before, with one output per token of the vocabulary.

The last term is q's own next-token loss on the tokens that the reference wrote: the reference's
frozen unembedding reads q's hidden states. It has no part in guidance. It keeps what pretraining
taught q's layers (to follow an edge of a graph, say) while the returns say nothing yet about how to
use it. With `next_token_horizon` above 1, a linear head for each distance k = 2, 3, ... predicts
the token k places ahead. q's layers must then look further than the next token, as the value must.
The heads are a role of their own, "ahead", which nothing reads after training.

Deviations: two-hot labels are offered as well as the nearest atom. Every token and every example
count alike. The paper weights examples alike ("sequence_mean"). A completion's length is known only
after it has been written, so 1 / length favors, at each prefix, the returns of short continuations.
The paper also drops prompts whose G examples all have the same return (`drop_equal_returns`). Of a
prompt that is solved with probability p, the share of right examples among those that stay is
(p - p^G) / (1 - p^G - (1 - p)^G) and not p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from tpu_rl import ranges
from tpu_rl.algorithm_spec import ExperienceSpec, RoleSpec
from tpu_rl.errors import InputError
from tpu_rl.losses import masked, return_distributions
from tpu_rl.losses.log_probs import (
    log_probs_of_hidden,
    over_actions,
    predicting,
    tokens_at_once,
    vocabulary,
)
from tpu_rl.losses.return_distributions import Support
from tpu_rl.losses.shapes import FloatRS, FloatRSD, FloatRSV
from tpu_rl.ranges import (
    Conflicts,
    Count,
    CountOrNone,
    In,
    Needs,
    NotNegative,
    Positive,
    ReadOnlyWith,
)
from tpu_rl.types import (
    Algorithm,
    Array,
    Experience,
    Metrics,
    PackedRows,
    Params,
    QExamples,
    Role,
    Roles,
    Sampling,
)

LABELS = {"nearest": return_distributions.nearest_atom, "two_hot": return_distributions.two_hot}


@dataclass(frozen=True)
class QSharpConfig:
    """The policy is the frozen reference; q learns."""

    q_type: Literal["v", "q"] = "v"
    """v: q reads a token to score it, so it reads `candidates` tokens at each step. q: it scores
    all tokens that may follow at once."""
    distribution: Literal["bernoulli", "histogram", "squared_error"] = "bernoulli"
    """Distribution of returns. Bernoulli and squared error are for returns in [0, 1]."""
    support: tuple[float, float, int] = (0.0, 1.0, 11)
    """Histogram only: lowest return, highest return, and the number of atoms, including both."""
    labels: Literal["nearest", "two_hot"] = "nearest"
    """Histogram only: label of a return between two atoms."""
    prefixes: Literal["all", "single"] = "all"
    """single: learn only the first labeled token of each example, where the reference took over."""
    loss_aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Weights of the tokens. token_mean: every token alike. sequence_mean: every example alike, as
    in the paper; where lengths vary, q then favors the returns of short continuations."""
    roll_in: Literal["guided", "none"] = "guided"
    """Author of the prefixes. guided: the policy that q guides, in the first round the reference;
    the reference continues each from a random token. none: the reference writes the whole answer,
    and all of its tokens are labeled."""
    next_token_coef: Annotated[
        NotNegative,
        Conflicts(
            "q_model", why="the reference's unembedding reads q, which starts as another model"
        ),
    ] = 0.0
    """Coefficient of q's next-token loss on the tokens that the reference wrote. It keeps what the
    pretrained layers know. Not with `q_model`."""
    next_token_horizon: Annotated[
        Count, Needs("next_token_coef", why="the horizon belongs to its loss")
    ] = 1
    """Predict the tokens up to so many places ahead, each distance with a head of its own."""
    unlabeled_tokens: Annotated[
        CountOrNone,
        ReadOnlyWith(
            "roll_in",
            "none",
            why="it counts tokens of answers that the reference wrote from their start",
        ),
    ] = 0
    """First tokens of an answer without a label, if the prompt dictates them. Their label would be
    the return of the prompt, for each answer again. Only with `roll_in="none"`."""
    drop_equal_returns: bool = False
    """Drop prompts whose examples all have the same return, as the paper does. With 16 examples, q
    then learns 0.07 for a prompt that is solved with probability 0.02."""
    layers: int | None = None
    """Start q as this many first layers of the reference, or of `q_model`; all layers if not given.
    """
    q_model: str | None = None
    """Start q as another model with the same tokenizer: a directory or hub id."""
    kl_coef: Positive = 0.1
    """KL coefficient (the paper's eta) of the guided policy that writes prefixes and is evaluated,
    in units of return per nat. Small values guide strongly. The default is the paper's."""
    candidates: Count | None = 20
    """Number of the reference's most likely tokens that are scored at each step; None (Q-type only)
    scores all."""
    candidate_mass: Annotated[
        float,
        In("(0, 1]", "use e.g. 0.95, or 1 to score all candidates, as a Q-type q does"),
        ReadOnlyWith("q_type", "v", why="it is a share of the candidates of a V-type q"),
    ] = 1.0
    """V-type only: of the candidates, score only the likeliest that have this share of the
    reference's probability together. 1 scores all. Less is faster, and treats the rest like tokens
    that are no candidates; see `sampler.guided_policy` for how far that moves the distribution."""
    prompts: Count = 256
    """Prompts of a round of data, each with --batch.group-size examples."""

    def __post_init__(self):
        ranges.check(self)
        low, high, atoms = self.support
        if self.candidates is None and self.q_type == "v":
            raise InputError(
                "a V-type q needs a number of candidates",
                where="--algorithm.candidates",
                why="it scores each candidate; only a Q-type q scores the whole vocabulary",
                fix="use a number above 0, e.g. 20",
            )
        if low >= high or atoms < 2:
            raise InputError(
                f"Q# cannot work with the support {self.support}",
                where="--algorithm.support",
                fix="use a lowest return below the highest, and 2 or more atoms",
            )

    @property
    def experience(self) -> ExperienceSpec:
        # One example is always equal to itself.
        smallest_group = 2 if self.drop_equal_returns else 1
        return ExperienceSpec("q_examples", policy="guided", smallest_group=smallest_group)

    @property
    def histogram(self) -> Support | None:
        """Support of the histogram, or None if q has a single logit."""
        return Support(*self.support) if self.distribution == "histogram" else None

    @property
    def return_range(self) -> tuple[float, float]:
        """Lowest and highest return that the distribution can represent."""
        if self.histogram is None:
            return 0.0, 1.0
        return self.histogram.low, self.histogram.high

    @property
    def outputs(self) -> int:
        """Number of outputs that describe the return of one token."""
        return 1 if self.histogram is None else self.histogram.atoms

    @property
    def roles(self) -> dict[str, RoleSpec]:
        q = RoleSpec(trainable=True, path=self.q_model, layers=self.layers)
        if self.q_type == "v":
            q = q._replace(outputs=self.outputs)
        else:
            q = q._replace(outputs_per_token=self.outputs)
        roles = {"policy": RoleSpec(trainable=False), "q": q}
        if self.next_token_horizon > 1:
            roles["ahead"] = RoleSpec(
                trainable=True, trunk_of="q", outputs_per_token=self.next_token_horizon - 1
            )
        return roles


@struct.dataclass
class Batch:
    """Leaves are [M, K, R, S]; the loss sees [R, S]."""

    rows: PackedRows
    weights: dict[str, Array]
    """"q": the weights of the labeled tokens; "next_token": those of the tokens to predict, if a
    loss predicts any."""
    returns: Array


def token_outputs(
    config: QSharpConfig, q: Role, params: Params, rows: PackedRows, hidden: FloatRSD
) -> FloatRSV:
    """Compute q's outputs for each token, [R, S, K]."""
    if config.q_type == "v":
        return q.logits(params, hidden)

    def chosen_outputs(tokens: Array, states: Array) -> Array:
        by_token = q.logits(params, states).reshape(*tokens.shape, -1, config.outputs)
        return jnp.take_along_axis(by_token, tokens[..., None, None], axis=2)[:, :, 0]

    # Q-type has V x K outputs per state, so it takes a chunk of tokens at a time.
    chunk_tokens = tokens_at_once(vocabulary(q, params, hidden))
    return over_actions(chosen_outputs, rows, hidden, chunk_tokens=chunk_tokens)


def log_probs_ahead(
    roles: Roles, params: Params, rows: PackedRows, hidden: FloatRSD, distance: int
) -> FloatRS:
    """Compute log p of each token given the states `distance` >= 2 tokens before it, [R, S]."""
    ahead = roles["ahead"]
    vocabulary_size = vocabulary(roles["policy"], params, hidden)

    def logits(params: Params, states: Array) -> Array:
        first = (distance - 2) * vocabulary_size
        return ahead.logits(params, states)[..., first : first + vocabulary_size]

    # log_probs_of_hidden shifts by one token.
    for _ in range(distance - 1):
        hidden = predicting(hidden, rows)
    return log_probs_of_hidden(ahead._replace(logits=logits), params, hidden, rows).log_probs


def q_sharp(config: QSharpConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build Q#. It learns from QExamples."""
    q = roles["q"]
    support = config.histogram
    next_token_coef = config.next_token_coef
    weighting = masked.weighting(config.loss_aggregation)

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        examples, layout = experience
        assert isinstance(examples, QExamples)
        learned = examples.action_mask
        # The first labeled token may be the last of a prefix that another policy wrote.
        written = learned & (jnp.cumsum(learned, axis=-1) > 1)
        learned &= jnp.cumsum(learned, axis=-1) > config.unlabeled_tokens
        if config.prefixes == "single":
            learned &= jnp.cumsum(learned, axis=-1) == 1
        weights = {"q": weighting(learned, layout.minibatch, layout.minibatches)}
        if next_token_coef:
            weights["next_token"] = weighting(written, layout.minibatch, layout.minibatches)
        batch = Batch(
            rows=layout.rows(examples.tokens),
            weights={name: layout.pack(of_tokens) for name, of_tokens in weights.items()},
            returns=layout.pack(jnp.where(learned, examples.returns, 0.0)),
        )
        return batch, state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        weights = batch.weights["q"]
        returns = batch.returns
        hidden = q.hidden(params, batch.rows)
        outputs = token_outputs(config, q, params, batch.rows, hidden)
        if config.distribution == "squared_error":
            losses = jnp.square(jax.nn.sigmoid(outputs[..., 0]) - returns)
        else:
            losses = return_distributions.negative_log_likelihood(
                outputs, returns, support, LABELS[config.labels]
            )
        value = masked.total(weights * losses, weights > 0)
        metrics: Metrics = {}
        if next_token_coef:
            next_weights = batch.weights["next_token"]
            frozen = jax.lax.stop_gradient(params)
            log_probs = log_probs_of_hidden(roles["policy"], frozen, hidden, batch.rows).log_probs
            value -= next_token_coef * masked.total(next_weights * log_probs, next_weights > 0)
            metrics["q/next_token_loss"] = masked.weighted_average(-log_probs, next_weights)
            for distance in range(2, config.next_token_horizon + 1):
                log_probs = log_probs_ahead(roles, params, batch.rows, hidden, distance)
                value -= next_token_coef * masked.total(next_weights * log_probs, next_weights > 0)
                metrics[f"q/next_token_loss_{distance}"] = masked.weighted_average(
                    -log_probs, next_weights
                )
        mean = return_distributions.mean_return(outputs, support)
        middle = 0.5 if support is None else (support.low + support.high) / 2
        right = jnp.where((mean > middle) == (returns > middle), 1.0, 0.0)
        return value, metrics | {
            "q/loss": masked.weighted_average(losses, weights),
            "q/mean": masked.weighted_average(mean, weights),
            "q/return": masked.weighted_average(returns, weights),
            "q/accuracy": masked.weighted_average(right, weights),
        }

    return Algorithm(make_batch, loss)
