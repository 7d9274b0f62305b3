"""The surrogates of GRPO and its relatives against the peers' numbers, and their own properties.

TRL's numbers are those of trl 1.16.0: `GRPOTrainer._compute_loss` in float64 with the arrays below
as per-token log-probs, beta 0, one process and one accumulation step. Each case names its
loss_type, importance_sampling_level, epsilon and epsilon_high. verl's numbers are those of verl
0.9.1, of the functions of `core_algos` with the same arrays.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl.algos.cispo import CispoConfig, cispo_surrogate
from tpu_rl.algos.gspo import GspoConfig, gspo_surrogate, sequence_ratio
from tpu_rl.algos.surrogates import SURROGATES, SurrogateName, SurrogatesConfig
from tpu_rl.algos.surrogates.covariance import covariances, drawn_by_covariance, largest
from tpu_rl.errors import InputError
from tpu_rl.losses import masked
from tpu_rl.losses.entropy import top_entropy, top_entropy_tokens
from tpu_rl.losses.log_probs import TokenLogProbs
from tpu_rl.losses.policy_batch import Part, PolicyBatch
from tpu_rl.losses.policy_gradient import SurrogateFunction, clipped_surrogate, policy_loss
from tpu_rl.losses.reference_kl import ReferenceKl, kl_to_reference
from tpu_rl.losses.sampler_correction import SamplerCorrection, correction, importance_weights
from tpu_rl.types import Metrics, PackedRows

# Three completions, of four, three and two tokens.
LENGTHS = (4, 3, 2)
MASK = np.arange(4)[None] < np.array(LENGTHS)[:, None]
LOG_PROBS = np.array([[-0.5, -1.2, -0.3, -2.0], [-0.9, -0.4, -1.1, 0.0], [-1.6, -0.7, 0.0, 0.0]])
OLD_LOG_PROBS = np.array(
    [[-0.7, -1.0, -0.6, -2.4], [-0.6, -0.9, -0.8, 0.0], [-1.5, -0.9, 0.0, 0.0]]
)
ADVANTAGES = np.array([1.5, -0.8, 0.6])


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def packed(values: np.ndarray, fill: float = 0.0) -> jax.Array:
    """Lay out one row of eleven slots: a prompt slot, the completions, padding."""
    row = np.concatenate([[fill], values[MASK], [fill]])
    return jnp.asarray(row[None])


def batch_of(advantages: np.ndarray, weighting: masked.Weighting) -> PolicyBatch:
    sequences = np.broadcast_to(np.arange(1, 4)[:, None], MASK.shape)
    sequence_ids = packed(sequences, fill=0).astype(jnp.int32)
    slots = jnp.broadcast_to(jnp.arange(11, dtype=jnp.int32), (1, 11))
    rows = PackedRows(slots, slots, slots, slots, sequence_ids, slots)
    weights = weighting(jnp.asarray(MASK), jnp.zeros(3, jnp.int32), 1)
    return PolicyBatch(
        rows=rows,
        weights={"policy": packed(np.asarray(weights))},
        action_mask=sequence_ids > 0,
        advantages=packed(np.broadcast_to(advantages[:, None], MASK.shape)),
        old_log_probs=packed(OLD_LOG_PROBS),
        reference_log_probs=None,
        importance=None,
        sampler_log_probs=None,
    )


def loss_and_gradient(
    surrogate: SurrogateFunction,
    advantages: np.ndarray,
    weighting: masked.Weighting,
    changes: Mapping[str, Any] = MappingProxyType({}),
    parts: Sequence[Part] = (),
) -> tuple[float, list[list[float]], Metrics]:
    """Return the loss, its gradient for each completion's log-probs, and the metrics, with changes
    of the batch and parts of the loss."""
    batch = replace(batch_of(advantages, weighting), **changes)

    def loss(log_probs: jax.Array) -> tuple[jax.Array, Metrics]:
        policy = TokenLogProbs(log_probs, jnp.zeros_like(log_probs))
        return policy_loss(policy, batch, surrogate, parts)

    # Prompt and padding hold numbers that must not matter.
    log_probs = packed(LOG_PROBS, fill=-7.0)
    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(log_probs)
    np.testing.assert_array_equal(gradient[0, [0, -1]], 0)
    by_completion = np.split(np.asarray(gradient[0, 1:-1]), np.cumsum(LENGTHS)[:-1])
    return float(value), [list(part) for part in by_completion], metrics


def check(actual: list[list[float]], expected: list[list[float]]) -> None:
    np.testing.assert_allclose(np.concatenate(actual), np.concatenate(expected), atol=2e-9)


def share(metrics: Metrics, name: str) -> float:
    return float(metrics[name].value / metrics[name].weight)


@pytest.mark.slow
def test_grpo_has_trls_loss_and_gradient():
    """loss_type dapo, importance_sampling_level token, epsilon 0.2, epsilon_high 0.25."""
    surrogate = partial(clipped_surrogate, clip_low=0.2, clip_high=0.25)
    loss, gradient, metrics = loss_and_gradient(surrogate, ADVANTAGES, masked.token_mean)
    assert loss == pytest.approx(-0.6096630395572004)
    check(
        gradient,
        [
            [-0.2035671264, -0.1364551255, 0, 0],
            [0, 0.1465530018, 0],
            [-0.0603224945, -0.0814268505],
        ],
    )
    assert share(metrics, "policy/clip_low") == pytest.approx(2 / 9)
    assert share(metrics, "policy/clip_high") == pytest.approx(2 / 9)


GRPO = partial(clipped_surrogate, clip_low=0.2, clip_high=0.25)
# The completions' log-ratios of old policy and sampler add up to 0.1, -0.3 and -0.4.
SAMPLER_LOG_PROBS = np.array(
    [[-0.6, -1.1, -0.9, -2.2], [-0.7, -0.6, -0.7, 0.0], [-1.2, -0.8, 0.0, 0.0]]
)
REFERENCE_LOG_PROBS = np.array(
    [[-0.9, -1.0, -0.8, -1.5], [-0.7, -0.8, -0.9, 0.0], [-1.1, -1.2, 0.0, 0.0]]
)
ENTROPY = np.array([[0.9, 0.2, 1.3, 0.5], [0.4, 1.1, 0.7, 0.0], [1.0, 0.3, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("mode", "cap", "floor", "threshold", "share", "expected_loss", "expected_gradient"),
    [
        (
            *("sequence_mask", 3.0, None, None, 1.0, -0.7173580666528068),
            [-0.2249764679, -0.1508062363, 0, 0, 0, 0.1085691341, 0, -0.0404353773, -0.0545820502],
        ),
        (
            *("sequence_truncate", 1.1, 0.8, None, 1.0, -0.7147371072076678),
            [-0.223923839, -0.1501006381, 0, 0, 0, 0.1172424015, 0, -0.0482579956, -0.0651414804],
        ),
        (
            *("token_mask", 1.2, 0.8, None, 1.0, -0.4363144313247319),
            [-0.184195153, -0.1508062363, 0, 0, 0, 0, 0, 0, -0.0736780612],
        ),
        (
            *("token_truncate", 1.2, None, None, 1.0, -0.6224333003350927),
            [-0.184195153, -0.1508062363, 0, 0, 0, 0.1085691341, 0, -0.0446880031, -0.0736780612],
        ),
        (
            *("sequence_mask", 3.0, None, 0.05, 1.0, -0.9312880143195551),
            [-0.2249764679, -0.1508062363, 0, 0, 0, 0, 0, -0.0404353773, -0.0545820502],
        ),
        (
            *("sequence_mask", 3.0, None, None, 0.4, -0.3870866524505878),
            [-0.2249764679, 0, 0, 0, 0, 0.1085691341, 0, -0.0404353773, 0],
        ),
    ],
    ids=["default", "sequence_truncate", "token_mask", "token_truncate", "off_policy", "entropy"],
)
def test_corrections_and_masks_have_trls_loss_and_gradient(
    mode, cap, floor, threshold, share, expected_loss, expected_gradient
):
    """loss_type dapo with vllm_importance_sampling_mode, clip_max and clip_min,
    off_policy_mask_threshold and top_entropy_quantile; the first is the default."""
    config = SamplerCorrection(
        importance_sampling_mode=mode,
        importance_sampling_cap=cap,
        importance_sampling_floor=floor,
        off_policy_mask_threshold=threshold,
    )
    parts = [correction(config)]
    actions = jnp.asarray(MASK)
    log_ratio = jnp.asarray(OLD_LOG_PROBS - SAMPLER_LOG_PROBS)
    importance, _ = importance_weights(config, log_ratio, actions)
    changes = {
        "importance": packed(np.asarray(importance)),
        "sampler_log_probs": packed(SAMPLER_LOG_PROBS),
    }
    if share < 1:
        high = top_entropy(jnp.asarray(ENTROPY), actions, share)
        changes["high_entropy"] = packed(np.asarray(high))
        parts.append(top_entropy_tokens(share))
    loss, gradient, _ = loss_and_gradient(GRPO, ADVANTAGES, masked.token_mean, changes, parts)
    assert loss == pytest.approx(expected_loss)
    check(gradient, [expected_gradient])


@pytest.mark.parametrize(
    ("estimator", "expected_loss", "expected_gradient"),
    [
        (
            "exact",
            -0.599869547526604,
            [
                -0.1981386697,
                -0.1382745272,
                0.0074992156,
                -0.008287915,
                -0.0016462627,
                0.1538806519,
                -0.0016462627,
                -0.0653493691,
                -0.0746412797,
            ],
        ),
        (
            "k3",
            -0.6017146814752302,
            [
                -0.1999040158,
                -0.1389151562,
                0.0043718816,
                -0.0072080141,
                -0.0024600306,
                0.1502161124,
                -0.0024600306,
                -0.0675305087,
                -0.077054969,
            ],
        ),
    ],
)
def test_the_kl_in_the_loss_has_trls_value_and_gradient(
    estimator, expected_loss, expected_gradient
):
    """loss_type dapo, beta 0.1, with and without use_bias_correction_kl."""
    changes = {"reference_log_probs": packed(REFERENCE_LOG_PROBS)}
    kl = kl_to_reference(ReferenceKl(kl_loss_coef=0.1, kl_estimator=estimator), reference=None)
    loss, gradient, _ = loss_and_gradient(GRPO, ADVANTAGES, masked.token_mean, changes, [kl])
    assert loss == pytest.approx(expected_loss)
    check(gradient, [expected_gradient])


@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
@pytest.mark.parametrize(
    ("advantages", "expected_loss", "expected_gradient", "low", "high"),
    [
        pytest.param(
            ADVANTAGES,
            -0.5015875526085382,
            [[0, 0, 0, 0], [0, 0, 0], [-0.1051271096] * 2],
            3 / 9,
            4 / 9,
            id="clipped",
        ),
        pytest.param(
            np.array([-1.5, 0.8, 0.6]),
            0.12744459556910592,
            [[0.1489057771] * 4, [-0.0859747645] * 3, [-0.1051271096] * 2],
            0.0,
            0.0,
            id="unclipped",
        ),
    ],
)
def test_gspo_has_trls_loss_and_gradient(
    advantages, expected_loss, expected_gradient, low, high, level
):
    """loss_type grpo, importance_sampling_level sequence, epsilon 0.03, epsilon_high 0.1.

    TRL counts clipped completions, one of three each, where our shares are of tokens.
    """
    surrogate = partial(gspo_surrogate, clip_low=0.03, clip_high=0.1, level=level)
    loss, gradient, metrics = loss_and_gradient(surrogate, advantages, masked.sequence_mean)
    assert loss == pytest.approx(expected_loss)
    check(gradient, expected_gradient)
    assert share(metrics, "policy/clip_low") == pytest.approx(low)
    assert share(metrics, "policy/clip_high") == pytest.approx(high)
    ratios = [
        np.exp(np.mean((LOG_PROBS - OLD_LOG_PROBS)[n, :length])) for n, length in enumerate(LENGTHS)
    ]
    assert float(metrics["policy/ratio_max"].value) == pytest.approx(max(ratios))
    assert float(metrics["policy/ratio_min"].value) == pytest.approx(min(ratios))


def test_the_ratio_of_trls_rloo_is_that_of_the_completion():
    """`RLOOTrainer._compute_loss`: exp(sum of log-ratios), clipped, the mean over completions. The
    ratios are exp(0.7), exp(-0.1) and exp(0.1); the first is clipped at 1.2."""
    surrogate = partial(gspo_surrogate, clip_low=0.2, clip_high=0.2, level="sequence_product")
    loss, gradient, metrics = loss_and_gradient(surrogate, ADVANTAGES, masked.sequence_mean)
    ratios = np.exp([0.7, -0.1, 0.1])
    assert loss == pytest.approx((-1.2 * 1.5 + 0.8 * ratios[1] - 0.6 * ratios[2]) / 3)
    check(gradient, [[0] * 4, [0.8 * ratios[1] / 3] * 3, [-0.6 * ratios[2] / 3] * 2])
    assert float(metrics["policy/ratio_max"].value) == pytest.approx(ratios[0])


@pytest.mark.parametrize(
    ("advantages", "sign"), [(ADVANTAGES, 1), (-ADVANTAGES, -1)], ids=["as given", "negated"]
)
def test_cispo_has_trls_loss_and_gradient(advantages, sign):
    """loss_type cispo, epsilon_high 1.25, which is the bound itself in TRL and 1 + clip_high here.

    The clipped weight does not depend on the sign of the advantage.
    """
    surrogate = partial(cispo_surrogate, clip_low=None, clip_high=0.25)
    loss, gradient, metrics = loss_and_gradient(surrogate, advantages, masked.token_mean)
    assert loss == pytest.approx(sign * 0.7220657056457266)
    expected = [
        [-0.2035671264, -0.1364551255, -0.2083333333, -0.2083333333],
        [0.0658505085, 0.1111111111, 0.0658505085],
        [-0.0603224945, -0.0814268505],
    ]
    check(gradient, [[sign * number for number in row] for row in expected])
    assert "policy/clip_low" not in metrics
    # TRL's share, of clipped tokens with a positive advantage, is 2 / 9.
    assert share(metrics, "policy/clip_high") == pytest.approx(3 / 9)


@pytest.mark.slow
@pytest.mark.parametrize("bound", [1.4, 100.0])
def test_cispo_of_old_completions_is_aipo(bound):
    """Over all tokens that an older policy may sample, the expected gradient is the truncated one:
    sum_a min(policy(a), bound x older(a)) A(a) grad log policy(a). Without truncation it is the
    policy gradient of the present policy, from samples of the older one."""
    logits = jnp.array([0.3, -0.8, 1.1, 0.0])
    older = jax.nn.softmax(jnp.array([1.2, 0.1, -0.5, 0.4]))
    advantages = jnp.array([1.0, -0.5, 0.2, -1.5])

    def expected_loss(logits: jax.Array) -> jax.Array:
        surrogate = cispo_surrogate(
            jax.nn.log_softmax(logits),
            jnp.log(older),
            advantages,
            None,
            clip_low=None,
            clip_high=bound - 1.0,
        )
        return jnp.sum(older * surrogate.losses)

    policy = np.asarray(jax.nn.softmax(logits))
    weights = np.minimum(policy, bound * np.asarray(older)) * np.asarray(advantages)
    # grad log softmax(logits)[a] = onehot(a) - softmax(logits)
    expected = -(weights - weights.sum() * policy)
    np.testing.assert_allclose(jax.grad(expected_loss)(logits), expected, rtol=1e-12)
    exact = jax.grad(lambda logits: -jnp.sum(jax.nn.softmax(logits) * advantages))(logits)
    is_exact = np.allclose(expected, exact, rtol=1e-12)
    assert is_exact == (bound >= (policy / np.asarray(older)).max())


def test_cispo_clips_from_below_if_it_is_told_to():
    surrogate = partial(cispo_surrogate, clip_low=0.1, clip_high=10.0)
    _, gradient, metrics = loss_and_gradient(surrogate, ADVANTAGES, masked.token_mean)
    ratio = np.maximum(np.exp(LOG_PROBS - OLD_LOG_PROBS), 0.9)
    expected = (-ratio * ADVANTAGES[:, None] / 9)[MASK]
    np.testing.assert_allclose(np.concatenate(gradient), expected, rtol=1e-7)
    # exp(-0.2), twice exp(-0.3); exp(-0.1) is above 0.9.
    assert share(metrics, "policy/clip_low") == pytest.approx(3 / 9)


@pytest.mark.parametrize(
    ("name", "settings", "weighting", "expected_loss", "expected_gradient"),
    [
        (
            "sapo",
            {},
            masked.sequence_mean,
            -1.0033915940095721,
            [
                [-0.1508195197, -0.1015052298, -0.1636726243, -0.1756407463],
                [0.0646461685, 0.130786829, 0.0646461685],
                [-0.0902791968, -0.1206556154],
            ],
        ),
        (
            "gmpo",
            {"clip_low": 0.1, "clip_high": 0.15},
            masked.sequence_mean,
            -0.44259800735952465,
            [[0, -0.1330618067, 0, 0], [0, 0.0982374143, 0], [-0.102531511, 0]],
        ),
        (
            "vespo",
            {},
            masked.token_mean,
            0.07459007403798215,
            [[-0.0322893575] * 4, [0.0796555978] * 3, [-0.0593939473] * 2],
        ),
        (
            "dppo_tv",
            {"clip_low": 0.05, "clip_high": 0.12, "ratio_cap": 1.3},
            masked.token_mean,
            0.8061556115446986,
            [
                [-0.2035671264, -0.1364551255, 0, -0.2166666667],
                [0, 0.1155555556, 0],
                [-0.0603224945, -0.0814268505],
            ],
        ),
        (
            "dppo_kl",
            {"clip_low": 0.02, "clip_high": 0.05, "ratio_cap": 1.3},
            masked.token_mean,
            0.8061556115446986,
            [
                [-0.2035671264, -0.1364551255, 0, -0.2166666667],
                [0, 0.1155555556, 0],
                [-0.0603224945, -0.0814268505],
            ],
        ),
        (
            "dro",
            {"beta": 0.3},
            masked.token_mean,
            0.6201666666666666,
            [
                [-0.16, -0.1733333333, -0.1566666667, -0.1533333333],
                [0.0788888889, 0.1055555556, 0.0788888889],
                [-0.07, -0.06],
            ],
        ),
        (
            "gpg",
            {},
            masked.token_mean,
            0.6066666666666666,
            [[-1.5 / 9] * 4, [0.8 / 9] * 3, [-0.6 / 9] * 2],
        ),
        # KL-Cov without its penalty: the plain ratio.
        (
            "kl_cov",
            {},
            masked.token_mean,
            -0.6771315035155557,
            [
                [-0.2035671264, -0.1364551255, -0.2249764680, -0.2486374496],
                [0.0658505085, 0.1465530018, 0.0658505085],
                [-0.0603224945, -0.0814268505],
            ],
        ),
    ],
)
def test_a_surrogate_has_the_peers_loss_and_gradient(
    name, settings, weighting, expected_loss, expected_gradient
):
    """VESPO's numbers are TRL's, the others verl's."""
    numbers = SurrogatesConfig(surrogate=name, **settings).settings
    of_surrogate = {key: x for key, x in numbers.items() if not key.startswith("covariance")}
    surrogate = partial(SURROGATES[name].function, **of_surrogate)
    loss, gradient, _ = loss_and_gradient(surrogate, ADVANTAGES, weighting)
    assert loss == pytest.approx(expected_loss, rel=2e-8)
    check(gradient, expected_gradient)


def test_every_surrogate_has_a_row():
    assert set(SURROGATES) == set(get_args(SurrogateName))


def test_stable_reinforce_has_a_finite_gradient_at_a_huge_ratio():
    """exp(+-800) is inf and 0; the log-ratio is clipped to +-ln 1000 before."""
    surrogate = partial(SURROGATES["stable_reinforce"].function, clip_low=0.2, clip_high=0.2)
    log_ratio = jnp.array([[800.0, 0.1, -800.0]])

    def loss(log_probs: jax.Array) -> jax.Array:
        return surrogate(log_probs, jnp.zeros((1, 3)), jnp.array([[-1.0, -1.0, 1.0]]), None).losses

    np.testing.assert_allclose(loss(log_ratio), [[1000, np.exp(0.1), -0.001]], rtol=1e-6)
    gradient = jax.grad(lambda x: loss(x).sum())(log_ratio)
    np.testing.assert_allclose(gradient, [[0, np.exp(0.1), 0]])


def one_step(advantages: np.ndarray = ADVANTAGES) -> PolicyBatch:
    """Return the batch above with the axes [M, K] in front."""
    return jax.tree.map(lambda x: x[None, None], batch_of(advantages, masked.token_mean))


def chosen(selected: jax.Array) -> list[int]:
    """Return the numbers of the tokens, of the nine of all completions."""
    return np.flatnonzero(np.asarray(selected).reshape(-1)[1:-1]).tolist()


def test_covariances_select_verls_tokens():
    """The tokens that verl's kl_cov (ratio .34) penalizes and that its clip_cov (.2 to .9) drops,
    where the policy is the old policy."""
    batch = one_step()
    learned = batch.weights["policy"] > 0
    assert chosen(largest(covariances(batch), 0.34, learned)) == [0, 1, 2]
    rollout = SimpleNamespace(
        tokens=np.zeros(MASK.shape),
        birth_key=jax.random.key_data(jax.random.split(jax.random.key(0), 3)),
    )
    layout = SimpleNamespace(pack=lambda x: packed(np.asarray(x))[None, None])
    bounds = {"covariance_low": 0.2, "covariance_high": 0.9}
    drawn = drawn_by_covariance(batch, rollout, layout, covariance_share=0.5, **bounds)
    assert chosen(drawn) == [0, 2]
    # One token is the least, and it is one of the two.
    [token] = chosen(drawn_by_covariance(batch, rollout, layout, covariance_share=0.01, **bounds))
    assert token in (0, 2)
    none = {"covariance_low": 5.0, "covariance_high": 6.0}
    assert chosen(drawn_by_covariance(batch, rollout, layout, covariance_share=0.5, **none)) == []


@pytest.mark.slow
def test_scales_and_filters_of_advantages():
    """Two of three completions have a return above 0, so p = 2 / 3."""
    rollout = SimpleNamespace(
        rewards=np.eye(3, 4) * [1.0, 0.0, 2.0, 0.0],
        action_mask=jnp.asarray(MASK | np.eye(3, 4, dtype=bool)),
        scored=jnp.ones(3, bool),
        truncated=jnp.zeros(3, bool),
        group_id=jnp.zeros(3, jnp.int32),
        episode_id=None,
    )
    layout = SimpleNamespace(pack=lambda x: packed(np.asarray(x))[None, None])
    draft = SimpleNamespace(rollout=rollout, layout=layout)

    def result(**settings: float) -> list[float]:
        batch = one_step()
        for part in SurrogatesConfig(**settings).parts({}):
            batch = batch if part.batch is None else part.batch(batch, draft, None)
        return np.asarray(batch.advantages).reshape(-1)[1:-1].tolist()

    plain = [1.5] * 4 + [-0.8] * 3 + [0.6] * 2
    assert result() == plain
    harder = [1.5] * 4 + [-0.8 * (1 + 0.5 * 2 / 3)] * 3 + [0.6] * 2
    assert result(success_slope=0.5) == pytest.approx(harder)
    # Mean 4.8 / 9, deviation 1.0044: the three advantages are 0.962, -1.327 and 0.066 of it away.
    assert result(outlier_sigmas=1.1) == [1.5] * 4 + [0.0] * 3 + [0.6] * 2
    assert result(outlier_sigmas=0.95) == [0.0] * 7 + [0.6] * 2
    # No token has a probability of 0.99.
    assert result(mastered_entropy=1.05) == plain


def test_a_setting_that_the_surrogate_does_not_read_is_refused():
    with pytest.raises(InputError, match="beta is not read with surrogate sapo"):
        SurrogatesConfig(surrogate="sapo", beta=1.0)


def test_gpg_learns_from_the_latest_policy_alone():
    assert SurrogatesConfig(surrogate="gpg").experience.latest_policy
    assert not SurrogatesConfig(surrogate="dro").experience.latest_policy


def test_the_sequence_ratio_leaves_tool_output_out():
    """A token that the policy did not choose has sequence id 0 and changes no length."""
    ids = jnp.array([[0, 1, 1, 0, 1, 2, 2, 0]], jnp.int32)
    log_ratio = jnp.array([[0.0, 0.3, 0.1, 0.0, 0.2, -0.5, 0.1, 0.0]])
    rows = PackedRows(ids, ids, ids, ids, ids, ids)
    ratio = sequence_ratio(log_ratio, jnp.zeros_like(log_ratio), rows)
    first = np.exp(0.2)
    second = np.exp(-0.2)
    expected = [[1, first, first, 1, first, second, second, 1]]
    np.testing.assert_allclose(ratio, expected, rtol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        partial(GspoConfig, clip_low=1.0),
        partial(GspoConfig, clip_high=0.0),
        partial(GspoConfig, entropy_coef=-1.0),
        partial(SurrogatesConfig, clip_low=1.0),
        partial(SurrogatesConfig, surrogate="dro", beta=0.0),
        partial(SurrogatesConfig, surrogate="kl_cov", covariance_share=1.1),
        partial(SurrogatesConfig, surrogate="clip_cov", covariance_low=5.0),
        partial(SurrogatesConfig, surrogate="gmpo", credit="turn"),
        partial(SurrogatesConfig, success_slope=-0.1),
        partial(SurrogatesConfig, outlier_sigmas=0.0),
        partial(CispoConfig, clip_low=0.0),
        partial(CispoConfig, clip_high=-1.0),
        partial(CispoConfig, importance_sampling_cap=0.0),
    ],
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(InputError):
        make()
