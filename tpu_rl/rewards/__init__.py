"""Reward functions, by name, and the scores that they give.

scoring           the convention of reward functions, and scores by it
registry          functions by the names of `--reward`, and Python functions with such names
verifiers         the table of built-in rewards
actions, choice, confidence, gsm8k_answers, length, math_verify_pool, others, programs, recall,
sets, similarity, sql_pool, text_form, tool_matching
                  their functions
composed          rewards of other rewards, and readers of references
spans             the part of a completion that states its answer
terms             weights, gates and schedules of a total
reward_model      a trained model as a reward
implicit          the log-ratio of two language models as a reward
worker_pool       functions of files in processes that can be killed
"""

from tpu_rl.environments import text_of as text_of
from tpu_rl.environments.answers import final_number as final_number
from tpu_rl.environments.answers import read_number as read_number
from tpu_rl.rewards.gsm8k_answers import gsm8k as gsm8k
from tpu_rl.rewards.math_verify_pool import math_answers as math_answers
from tpu_rl.rewards.math_verify_pool import math_equivalent as math_equivalent
from tpu_rl.rewards.programs import program_of as program_of
from tpu_rl.rewards.programs import python_tests as python_tests
from tpu_rl.rewards.programs import python_tests_unsandboxed as python_tests_unsandboxed
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
from tpu_rl.rewards.verifiers import BUILTIN as BUILTIN
from tpu_rl.rewards.verifiers import AnswerReaders as AnswerReaders
from tpu_rl.rewards.verifiers import ReadAnswer as ReadAnswer
from tpu_rl.rewards.verifiers import ReadGroups as ReadGroups
from tpu_rl.rewards.verifiers import Verifier as Verifier
from tpu_rl.rewards.verifiers import answer_readers as answer_readers
from tpu_rl.rewards.verifiers import runs_during_sampling as runs_during_sampling
from tpu_rl.rewards.worker_pool import RewardLimits as RewardLimits
from tpu_rl.runtime.segments import Segment as Segment
