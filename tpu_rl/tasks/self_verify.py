"""A problem, and a judgment of the own answer (RISE, arXiv 2505.13445).

    turn 1    the policy answers                      1 if the answer is right, else 0
    turn 2    it says 1 for right or 0 for wrong      1 if that is so, else 0

So the verifier's verdict on the answer is the truth of the judgment, and one batch teaches both.
Let each turn be compared with the same turn of the group, by its own reward alone:

    --algorithm.credit turn --algorithm.gamma 0

Without it, the return of an episode is the sum, and answers are paid for being easy to judge.

Problems are rows with the columns `prompt` and `answer`, as those of `multi_attempt`. Problems of
the arithmetic task are told in their own characters: after "#12" it reads "=;", and "#1" says that
12 is right. With one turn (`--evaluation.turns 1`) an episode ends with the answer. Reward
functions see `answer_is_right` and `judged_right` in the column `environments`.

Deviations: the paper asks in a new prompt that shows problem and answer, scores -0.5, 0 or 1, and
judges a part of the answers; here the question follows the answer, whose text it shares.
"""

from __future__ import annotations

from typing import Any

from tpu_rl.environments import answers
from tpu_rl.environments.contract import PlainState
from tpu_rl.tasks import arithmetic

ASK = (
    "Is your answer right? Check it step by step. End with \\boxed{1} if it is, or with \\boxed{0} "
    "if it is not."
)
ASK_EXPRESSION = "=;"


class SelfVerify(PlainState):
    """A problem, its answer, and the judgment of the answer. A text game."""

    text_game = True

    def reset(self, prompt: Any, answer: str, max_turns: int = 2, **row: Any) -> None:
        """Begin a problem."""
        self._is_expression = isinstance(prompt, str) and set(prompt) <= set(arithmetic.ALPHABET)
        self._answer = str(answer)
        self._asks = max_turns > 1
        self.answer_is_right: bool | None = None
        """None before the answer."""
        self.judged_right: bool | None = None
        """None without a judgment that can be read."""

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Judge the answer, or the judgment."""
        read = arithmetic.parse_answer if self._is_expression else answers.final_number
        value = read(text)
        if self.answer_is_right is None:
            self.answer_is_right = value is not None and value == answers.read_number(self._answer)
            question = ASK_EXPRESSION if self._is_expression else ASK
            return question if self._asks else "", float(self.answer_is_right), not self._asks, {}
        verdicts: dict[Any, bool] = {0: False, 1: True}
        self.judged_right = verdicts.get(value)
        return "", float(self.judged_right == self.answer_is_right), True, {}


ENVIRONMENTS = {"self_verify": SelfVerify}
