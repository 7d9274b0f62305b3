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
    from tpu_rl.environments import text_of
    from tpu_rl.environments.answers import final_number, read_number
    from tpu_rl.rewards.registry import at_step, from_path, register, registered, registered_for_run
    from tpu_rl.rewards.scoring import (
        DEFAULT_LIMITS,
        ROLLOUT_COLUMNS,
        FunctionScores,
        Reward,
        RewardFault,
        Scores,
        apply,
        as_answers,
        of_rows,
        requested_columns,
        require_columns,
        require_few_faults,
        score,
    )
    from tpu_rl.rewards.terms import RewardTerm, totals
    from tpu_rl.rewards.verifier import (
        AnswerReaders,
        ReadAnswer,
        ReadGroups,
        Verifier,
        answer_readers,
        runs_during_sampling,
    )
    from tpu_rl.rewards.worker_pool import RewardLimits
    from tpu_rl.runtime.segments import Segment
    from tpu_rl.user_code import PYTHON

lazy.exports(__name__, __file__)
