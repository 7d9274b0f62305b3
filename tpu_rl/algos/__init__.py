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
    from tpu_rl.losses.value_loss import Critic
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
