"""The algorithms, by the type of their configuration."""

from __future__ import annotations

from tpu_rl.algos.a_star_po import AStarPoConfig, a_star_po
from tpu_rl.algos.distill import DistillConfig, distill
from tpu_rl.algos.dpo import DpoConfig, dpo
from tpu_rl.algos.grpo import GrpoConfig, grpo
from tpu_rl.algos.kto import KtoConfig, kto
from tpu_rl.algos.mini_llm import MiniLlmConfig, mini_llm
from tpu_rl.algos.ppo import PpoConfig, ppo
from tpu_rl.algos.process_reward import ProcessRewardConfig, process_reward
from tpu_rl.algos.q_sharp import QSharpConfig, q_sharp
from tpu_rl.algos.reinforce import ReinforceConfig, reinforce
from tpu_rl.algos.reward_model import RewardModelConfig, reward_model
from tpu_rl.algos.sentence_reward import SentenceRewardConfig, sentence_reward
from tpu_rl.algos.sft import SftConfig, sft
from tpu_rl.algos.value_pretraining import ValuePretrainingConfig, value_pretraining

ALGORITHMS = {
    DistillConfig: distill,
    MiniLlmConfig: mini_llm,
    DpoConfig: dpo,
    KtoConfig: kto,
    GrpoConfig: grpo,
    QSharpConfig: q_sharp,
    ProcessRewardConfig: process_reward,
    RewardModelConfig: reward_model,
    SentenceRewardConfig: sentence_reward,
    SftConfig: sft,
    PpoConfig: ppo,
    ValuePretrainingConfig: value_pretraining,
    ReinforceConfig: reinforce,
    AStarPoConfig: a_star_po,
}
AlgorithmConfig = (
    DistillConfig
    | MiniLlmConfig
    | DpoConfig
    | KtoConfig
    | GrpoConfig
    | QSharpConfig
    | ProcessRewardConfig
    | RewardModelConfig
    | SentenceRewardConfig
    | SftConfig
    | PpoConfig
    | ValuePretrainingConfig
    | ReinforceConfig
    | AStarPoConfig
)  # fmt: skip

__all__ = [
    "ALGORITHMS",
    "AlgorithmConfig",
    "DistillConfig",
    "DpoConfig",
    "KtoConfig",
    "dpo",
    "kto",
    "MiniLlmConfig",
    "distill",
    "mini_llm",
    "AStarPoConfig",
    "GrpoConfig",
    "ReinforceConfig",
    "a_star_po",
    "reinforce",
    "PpoConfig",
    "ValuePretrainingConfig",
    "ppo",
    "value_pretraining",
    "ProcessRewardConfig",
    "QSharpConfig",
    "q_sharp",
    "RewardModelConfig",
    "SentenceRewardConfig",
    "SftConfig",
    "grpo",
    "process_reward",
    "reward_model",
    "sentence_reward",
    "sft",
]
