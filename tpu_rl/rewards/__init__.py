"""Reward functions, by name, and the scores that they give.

scoring           the convention of reward functions, and scores by it
registry          functions by the names of `--reward`, and Python functions with such names
verifier          the row of a built-in reward; `tpu_rl.verifiers` has their functions
spans             the part of a completion that states its answer
terms             weights, gates and schedules of a total
reward_model      a trained model as a reward
worker_pool       functions of files in processes that can be killed
"""

from typing import TYPE_CHECKING

from tpu_rl import lazy

if TYPE_CHECKING:
    from tpu_rl.environments import text_of as text_of
    from tpu_rl.environments.answers import final_number as final_number
    from tpu_rl.environments.answers import read_number as read_number
    from tpu_rl.rewards.registry import at_step as at_step
    from tpu_rl.rewards.registry import from_path as from_path
    from tpu_rl.rewards.registry import register as register
    from tpu_rl.rewards.registry import registered as registered
    from tpu_rl.rewards.registry import registered_for_run as registered_for_run
    from tpu_rl.rewards.scoring import DEFAULT_LIMITS as DEFAULT_LIMITS
    from tpu_rl.rewards.scoring import ROLLOUT_COLUMNS as ROLLOUT_COLUMNS
    from tpu_rl.rewards.scoring import FunctionScores as FunctionScores
    from tpu_rl.rewards.scoring import Reward as Reward
    from tpu_rl.rewards.scoring import RewardFault as RewardFault
    from tpu_rl.rewards.scoring import Scores as Scores
    from tpu_rl.rewards.scoring import apply as apply
    from tpu_rl.rewards.scoring import as_answers as as_answers
    from tpu_rl.rewards.scoring import limited_to_share as limited_to_share
    from tpu_rl.rewards.scoring import of_rows as of_rows
    from tpu_rl.rewards.scoring import requested_columns as requested_columns
    from tpu_rl.rewards.scoring import require_columns as require_columns
    from tpu_rl.rewards.scoring import require_few_faults as require_few_faults
    from tpu_rl.rewards.scoring import score as score
    from tpu_rl.rewards.terms import PYTHON as PYTHON
    from tpu_rl.rewards.terms import RewardTerm as RewardTerm
    from tpu_rl.rewards.terms import totals as totals
    from tpu_rl.rewards.verifier import AnswerReaders as AnswerReaders
    from tpu_rl.rewards.verifier import ReadAnswer as ReadAnswer
    from tpu_rl.rewards.verifier import ReadGroups as ReadGroups
    from tpu_rl.rewards.verifier import Verifier as Verifier
    from tpu_rl.rewards.verifier import answer_readers as answer_readers
    from tpu_rl.rewards.verifier import runs_during_sampling as runs_during_sampling
    from tpu_rl.rewards.worker_pool import RewardLimits as RewardLimits
    from tpu_rl.runtime.segments import Segment as Segment

lazy.exports(__name__, __file__)
