"""Episodes that go on: nothing is asked twice, and a new environment has the old one's state."""

import json
import string

import numpy as np
import pytest

from tpu_rl.environments.contract import PlainState
from tpu_rl.environments.pool import EnvironmentLimits, EnvironmentPool
from tpu_rl.rollout.conversations import episode_log
from tpu_rl.rollout.conversations.episode_log import EpisodeLog, LoggedTurn
from tpu_rl.rollout.conversations.episodes import Episode, Episodes
from tpu_rl.rollout.requests import Environment
from tpu_rl.runtime import typed_json
from tpu_rl.sampler import Turn
from tpu_rl.tokenizers import characters

TEMPLATE = (
    "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<eos>\n{% endfor %}{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
CHAT = characters(string.printable, TEMPLATE)
ASKED: list[str] = []
ROWS = [{"prompt": [{"role": "user", "content": "?"}]}]


class Till(PlainState):
    """Tools that count, and note what they are asked."""

    def reset(self, seed: int, **row) -> str:
        ASKED.append("reset")
        self.total = seed % 10
        return "Begin."

    def add(self, number: int) -> str:
        """Add.

        Args:
            number: The number.
        """
        ASKED.append(f"add {number}")
        self.total += number
        return f"{self.total}"

    def get_reward(self) -> float:
        ASKED.append("reward")
        return float(self.total)


class WithTuples(Till):
    def __getstate__(self):
        return {"total": (self.total,)}


class Lost(Till):
    def __setstate__(self, state):
        raise OSError("no room")


def pool_of(environment: type) -> EnvironmentPool:
    return EnvironmentPool(environment, EnvironmentLimits(isolate=False))


def add(number: int) -> str:
    call_of_add = {"name": "add", "arguments": {"number": number}}
    return f"<tool_call>{json.dumps(call_of_add)}</tool_call>"


def go_on(
    pool: EnvironmentPool, log: EpisodeLog | None, texts: list[str]
) -> tuple[EpisodeLog, list[str], Episode]:
    """Go on with an episode, in which the policy says some texts.

    Returns its log, all that the policy has read, and what became of it.
    """
    ASKED.clear()
    read = []
    with Episodes(
        rows=ROWS,
        environment=Environment(pool, max_turns=9, max_observation_tokens=60),
        tokenizer=CHAT,
        max_prompt_tokens=200,
        step=3,
        old_logs=[log],
        saves=True,
    ) as episodes:
        prompts = episodes.begin()
        read.append(CHAT.decode(prompts[0]))
        log = episodes.logs[0]
        earlier = list(log.turns)
        for text in texts:
            ids = [*CHAT.encode(text), CHAT.eos_ids[0]]
            log_probs = np.linspace(-1, 0, len(ids), dtype=np.float32)
            log.turns.append(LoggedTurn(Turn(0, ids, log_probs, log_probs - 1, True), 7))
        for number, logged in enumerate(log.turns):
            episodes.on_turn(0, logged.turn.tokens, True)
            if number == len(log.turns) - 1 and number >= len(earlier) and texts[-1] != "end":
                break  # Its answer is on its way.
            news = {}
            while not news:
                news = episodes.poll(wait=True)
            read.append("" if news[0] is None else CHAT.decode(news[0]))
        episodes.unfinished = {0}
    for answer in log.answers:
        answer.reply.result()
    return log, read, episodes.by_row[0]


def stored(log: EpisodeLog) -> EpisodeLog:
    """Return a log as a checkpoint brings it back."""
    values = json.loads(json.dumps(typed_json.to_json(log.copy())))
    return typed_json.from_json(values, *episode_log.CLASSES)


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_episode_goes_on_and_nothing_is_asked_twice(is_killed):
    whole_read, whole = go_on(pool_of(Till), None, [add(1), add(2), add(3), "end"])[1:]
    pool = pool_of(Till)
    log, _, _ = go_on(pool, None, [add(1), add(2)])
    assert ASKED == ["reset", "add 1", "add 2"]
    if is_killed:
        log, pool = stored(log), pool_of(Till)
    log, _, _ = go_on(pool, log, [add(3)])
    assert ASKED == ["add 3"]
    if is_killed:
        log, pool = stored(log), pool_of(Till)
    log, read, result = go_on(pool, log, ["end"])
    assert ASKED == ["reward"]
    assert read == whole_read
    names = ("prompt", "messages", "turn_rewards", "reward", "fault", "tool_calls", "state")
    assert [getattr(result, name) for name in names] == [getattr(whole, name) for name in names]
    # It may wait for others of its group, and then is asked for nothing.
    _, read, result = go_on(pool, stored(log), [])
    assert ASKED == []
    assert (read, result.reward) == (whole_read, whole.reward)


def test_an_environment_lives_until_nobody_goes_on():
    pool = pool_of(Till)
    log, _, _ = go_on(pool, None, [add(1)])
    assert list(pool._lives_in) == [log.pool_id]
    log.end()
    assert not pool._lives_in
    log, _, _ = go_on(pool, None, ["end"])
    assert not pool._lives_in


def test_a_log_is_stored_exactly():
    log, _, _ = go_on(pool_of(Till), None, [add(1), "end"])
    restored = stored(log)
    assert typed_json.to_json(restored) == typed_json.to_json(log.copy())
    assert [answer.reply.result() for answer in restored.answers] == [
        answer.reply.result() for answer in log.answers
    ]
    for new, old in zip(restored.turns, log.turns, strict=True):
        assert new.policy_step == old.policy_step == 7
        np.testing.assert_array_equal(new.turn.log_probs, old.turn.log_probs)
        np.testing.assert_array_equal(new.turn.behaviour_log_probs, old.turn.behaviour_log_probs)
    assert restored.num_tokens == log.num_tokens == len(log.turns[0].turn.tokens) + 4


def test_what_cannot_be_saved_or_restored_is_a_fault_of_its_episode():
    _, _, result = go_on(pool_of(WithTuples), None, ["end"])
    assert "what JSON writes as another value" in result.fault
    assert result.reward is None
    log, _, _ = go_on(pool_of(Lost), None, [add(1)])
    _, _, result = go_on(pool_of(Lost), stored(log), ["end"])
    assert "it is not restored: OSError: no room" in result.fault
    assert result.reward is None
