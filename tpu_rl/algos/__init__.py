"""The algorithms, each in its own file, and ALGORITHMS, where they are registered.

To register a new algorithm, import its configuration and its factory here and add a row to
ALGORITHMS. The command line, config.yaml and the launcher know it from there.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from tpu_rl.algorithm_spec import ExperienceSpec, RoleSpec
from tpu_rl.algos.a_star_po import AStarPoConfig, a_star_po
from tpu_rl.algos.cispo import CispoConfig, cispo
from tpu_rl.algos.direct_advantage import DirectAdvantageConfig, direct_advantage
from tpu_rl.algos.distill import DistillConfig, distill
from tpu_rl.algos.dpo import DpoConfig, dpo
from tpu_rl.algos.grpo import GrpoConfig, grpo
from tpu_rl.algos.gspo import GspoConfig, gspo
from tpu_rl.algos.kto import KtoConfig, kto
from tpu_rl.algos.mini_llm import MiniLlmConfig, mini_llm
from tpu_rl.algos.mixed import MixedConfig, mixed
from tpu_rl.algos.ppo import PpoConfig, ppo
from tpu_rl.algos.prime import PrimeConfig, prime
from tpu_rl.algos.process_reward import ProcessRewardConfig, process_reward
from tpu_rl.algos.q_sharp import QSharpConfig, q_sharp
from tpu_rl.algos.reinforce import ReinforceConfig, reinforce
from tpu_rl.algos.reward_model import RewardModelConfig, reward_model
from tpu_rl.algos.rft import RftConfig, rft
from tpu_rl.algos.scored_completions import ScoredCompletionsConfig, scored_completions
from tpu_rl.algos.self_distill import SelfDistillConfig, self_distill
from tpu_rl.algos.sentence_reward import SentenceRewardConfig, sentence_reward
from tpu_rl.algos.sft import SftConfig, sft
from tpu_rl.algos.surrogates import SurrogatesConfig, surrogates
from tpu_rl.algos.unlearn import UnlearnConfig, unlearn
from tpu_rl.algos.value_pretraining import ValuePretrainingConfig, value_pretraining
from tpu_rl.types import Algorithm

ALGORITHMS: dict[type, Callable[[Any, Any, Any], Algorithm]] = {
    AStarPoConfig: a_star_po,
    CispoConfig: cispo,
    DirectAdvantageConfig: direct_advantage,
    DistillConfig: distill,
    DpoConfig: dpo,
    GrpoConfig: grpo,
    GspoConfig: gspo,
    KtoConfig: kto,
    MiniLlmConfig: mini_llm,
    MixedConfig: mixed,
    PpoConfig: ppo,
    PrimeConfig: prime,
    ProcessRewardConfig: process_reward,
    QSharpConfig: q_sharp,
    ReinforceConfig: reinforce,
    RewardModelConfig: reward_model,
    RftConfig: rft,
    ScoredCompletionsConfig: scored_completions,
    SelfDistillConfig: self_distill,
    SentenceRewardConfig: sentence_reward,
    SftConfig: sft,
    SurrogatesConfig: surrogates,
    UnlearnConfig: unlearn,
    ValuePretrainingConfig: value_pretraining,
}
"""Type of a configuration -> factory (config, roles, sampling) -> Algorithm."""

if TYPE_CHECKING:

    class AlgorithmConfig(Protocol):
        """A configuration in ALGORITHMS: a frozen dataclass with these two properties."""

        @property
        def experience(self) -> ExperienceSpec: ...

        @property
        def roles(self) -> dict[str, RoleSpec]: ...

else:
    # The command line and config.yaml need the union of the types at run time.
    AlgorithmConfig = functools.reduce(operator.or_, ALGORITHMS)
