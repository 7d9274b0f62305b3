"""SFT and GRPO with the auxiliary loss of Q#: predict the token after the next one, too.

    python launch/run.py star_graph_sft --algorithm bench/two_ahead.py:sft_two_ahead

    loss + ahead_coef sum_t w_t (-log p_2(y_t | x, y_<t-1)),    w_t: the token's weight in the loss

p_2 is a linear head on the policy's hidden states, as in `tpu_rl.algos.q_sharp`.
"""

from dataclasses import dataclass

from tpu_rl.algorithm_spec import RoleSpec
from tpu_rl.algos.grpo import GrpoConfig, group_policy_gradient
from tpu_rl.algos.q_sharp import log_probs_ahead
from tpu_rl.algos.sft import Batch, SftConfig, sft
from tpu_rl.losses import masked
from tpu_rl.losses.policy_batch import Part, PolicyBatch, Prediction
from tpu_rl.types import Algorithm, Array, Metrics, Params, Roles, Sampling

AHEAD = {"ahead": RoleSpec(trainable=True, trunk_of="policy", outputs_per_token=1)}


def loss_ahead(
    roles: Roles, params: Params, batch: Batch | PolicyBatch, hidden: Array, coef: float
) -> tuple[Array, Metrics]:
    """Compute coef times the loss two tokens ahead, and its metric."""
    weights = batch.weights["policy"]
    log_probs = log_probs_ahead(roles, params, batch.rows, hidden, distance=2)
    value = -coef * masked.total(weights * log_probs, weights > 0)
    return value, {"ahead/loss": masked.weighted_average(-log_probs, weights)}


@dataclass(frozen=True)
class SftTwoAheadConfig(SftConfig):
    """SFT's settings, and the coefficient."""

    ahead_coef: float = 0.5

    @property
    def roles(self) -> dict[str, RoleSpec]:
        return super().roles | AHEAD


def sft_two_ahead(config: SftTwoAheadConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build SFT with the loss two tokens ahead."""
    algorithm = sft(config, roles, sampling)

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        value, metrics = algorithm.loss(params, batch)
        hidden = roles["policy"].hidden(params, batch.rows)
        term, of_term = loss_ahead(roles, params, batch, hidden, config.ahead_coef)
        return value + term, metrics | of_term

    return algorithm._replace(loss=loss)


@dataclass(frozen=True)
class GrpoTwoAheadConfig(GrpoConfig):
    """GRPO's settings, and the coefficient."""

    ahead_coef: float = 0.5

    @property
    def roles(self) -> dict[str, RoleSpec]:
        return super().roles | AHEAD


def grpo_two_ahead(config: GrpoTwoAheadConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build GRPO with the loss two tokens ahead as a further part."""

    def term(prediction: Prediction, batch: PolicyBatch) -> tuple[Array, Metrics]:
        params, hidden = prediction.params, prediction.hidden
        assert hidden is not None
        return loss_ahead(roles, params, batch, hidden, config.ahead_coef)

    surrogate = config.surrogate_function
    return group_policy_gradient(config, roles, sampling, surrogate, [Part(term=term)])
