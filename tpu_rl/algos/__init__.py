"""The algorithms, each in its own file, and ALGORITHMS, the table that the command line reads.

The algorithm `mini_llm` is the factory `mini_llm` and its configuration `MiniLlmConfig` in
`tpu_rl.algos.mini_llm`. To register a new one, write its file and add its name here. A row loads
when it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tpu_rl import lazy
from tpu_rl.algorithm_spec import ExperienceSpec, RoleSpec

if TYPE_CHECKING:
    from tpu_rl.algos.a_star_po import AStarPoConfig as AStarPoConfig
    from tpu_rl.algos.a_star_po import a_star_po as a_star_po
    from tpu_rl.algos.cispo import CispoConfig as CispoConfig
    from tpu_rl.algos.cispo import cispo as cispo
    from tpu_rl.algos.direct_advantage import DirectAdvantageConfig as DirectAdvantageConfig
    from tpu_rl.algos.direct_advantage import direct_advantage as direct_advantage
    from tpu_rl.algos.distill import DistillConfig as DistillConfig
    from tpu_rl.algos.distill import distill as distill
    from tpu_rl.algos.dpo import DpoConfig as DpoConfig
    from tpu_rl.algos.dpo import dpo as dpo
    from tpu_rl.algos.grpo import GrpoConfig as GrpoConfig
    from tpu_rl.algos.grpo import grpo as grpo
    from tpu_rl.algos.gspo import GspoConfig as GspoConfig
    from tpu_rl.algos.gspo import gspo as gspo
    from tpu_rl.algos.kto import KtoConfig as KtoConfig
    from tpu_rl.algos.kto import kto as kto
    from tpu_rl.algos.mini_llm import MiniLlmConfig as MiniLlmConfig
    from tpu_rl.algos.mini_llm import mini_llm as mini_llm
    from tpu_rl.algos.mixed import MixedConfig as MixedConfig
    from tpu_rl.algos.mixed import mixed as mixed
    from tpu_rl.algos.ppo import PpoConfig as PpoConfig
    from tpu_rl.algos.ppo import ppo as ppo
    from tpu_rl.algos.prime import PrimeConfig as PrimeConfig
    from tpu_rl.algos.prime import prime as prime
    from tpu_rl.algos.process_reward import ProcessRewardConfig as ProcessRewardConfig
    from tpu_rl.algos.process_reward import process_reward as process_reward
    from tpu_rl.algos.q_sharp import QSharpConfig as QSharpConfig
    from tpu_rl.algos.q_sharp import q_sharp as q_sharp
    from tpu_rl.algos.reinforce import ReinforceConfig as ReinforceConfig
    from tpu_rl.algos.reinforce import reinforce as reinforce
    from tpu_rl.algos.reward_model import RewardModelConfig as RewardModelConfig
    from tpu_rl.algos.reward_model import reward_model as reward_model
    from tpu_rl.algos.rft import RftConfig as RftConfig
    from tpu_rl.algos.rft import rft as rft
    from tpu_rl.algos.scored_completions import ScoredCompletionsConfig as ScoredCompletionsConfig
    from tpu_rl.algos.scored_completions import scored_completions as scored_completions
    from tpu_rl.algos.self_distill import SelfDistillConfig as SelfDistillConfig
    from tpu_rl.algos.self_distill import self_distill as self_distill
    from tpu_rl.algos.sentence_reward import SentenceRewardConfig as SentenceRewardConfig
    from tpu_rl.algos.sentence_reward import sentence_reward as sentence_reward
    from tpu_rl.algos.sft import SftConfig as SftConfig
    from tpu_rl.algos.sft import sft as sft
    from tpu_rl.algos.surrogates import SurrogatesConfig as SurrogatesConfig
    from tpu_rl.algos.surrogates import surrogates as surrogates
    from tpu_rl.algos.unlearn import UnlearnConfig as UnlearnConfig
    from tpu_rl.algos.unlearn import unlearn as unlearn
    from tpu_rl.algos.value_pretraining import ValuePretrainingConfig as ValuePretrainingConfig
    from tpu_rl.algos.value_pretraining import value_pretraining as value_pretraining
    from tpu_rl.losses.value_loss import Critic as Critic
    from tpu_rl.types import Algorithm

    class AlgorithmConfig(Protocol):
        """A configuration in ALGORITHMS: a frozen dataclass with these two properties."""

        @property
        def experience(self) -> ExperienceSpec: ...

        @property
        def roles(self) -> dict[str, RoleSpec]: ...

else:
    # The command line reads the flags of the class that the preset has.
    AlgorithmConfig = Any


class Row(NamedTuple):
    """An algorithm: the class of its configuration, and (config, roles, sampling) -> Algorithm."""

    config: type
    factory: Callable[[Any, Any, Any], Algorithm]


def _row(module: ModuleType, name: str) -> Row:
    members = vars(module)
    camel_case = "".join(word.capitalize() for word in name.split("_"))
    return Row(members[f"{camel_case}Config"], members[name])


NAMES = (
    "a_star_po",
    "cispo",
    "direct_advantage",
    "distill",
    "dpo",
    "grpo",
    "gspo",
    "kto",
    "mini_llm",
    "mixed",
    "ppo",
    "prime",
    "process_reward",
    "q_sharp",
    "reinforce",
    "reward_model",
    "rft",
    "scored_completions",
    "self_distill",
    "sentence_reward",
    "sft",
    "surrogates",
    "unlearn",
    "value_pretraining",
)

ALGORITHMS: lazy.LazyTable[Row] = lazy.LazyTable(
    _row, {name: f"tpu_rl.algos.{name}" for name in NAMES}
)
"""Name -> configuration and factory."""


def factory_of(config: type) -> Callable[[Any, Any, Any], Algorithm]:
    """Return the factory of the algorithm with a class of configurations."""
    return ALGORITHMS[lazy.name_of(config.__name__, "Config")].factory


lazy.exports(__name__, __file__)
