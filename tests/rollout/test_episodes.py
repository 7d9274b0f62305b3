"""Episodes with a scripted policy: what follows each turn, and what becomes of each episode."""

import json
import string
import time

import pytest

from tpu_rl.environments.pool import EnvironmentLimits, EnvironmentPool
from tpu_rl.errors import InputError
from tpu_rl.rollout.conversations.episodes import Episodes, require_fit
from tpu_rl.rollout.requests import Environment
from tpu_rl.tokenizers import Tokenizer, characters

TEMPLATE = (
    "{% if tools %}tools: {% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<eos>\n{% endfor %}{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
CHAT = characters(string.printable, TEMPLATE)
PLAIN = characters(string.printable)


class Store:
    """Tools."""

    def reset(self, found: str = "", fail: bool = False, **row) -> str | None:
        self.found = found
        self.searches = 0
        if fail:
            raise ValueError("no store")
        return row.get("first")

    def search(self, query: str) -> str:
        """Search.

        Args:
            query: The query.
        """
        self.searches += 1
        if query == "slow":
            time.sleep(0.3)
        return f"{query} is {self.found}"

    def get_reward(self) -> float | None:
        return float(self.searches) if self.found != "nan" else float("nan")


class Countdown:
    """A game: subtract from a number until it is zero."""

    def reset(self, start: int, seed: int):
        self.left = start
        self.seed = seed
        return f"{start}:"

    def step(self, text):
        self.left -= int(text)
        return f" {self.left}:", float(self.left == 0), self.left <= 0, {}


def call(query: str) -> str:
    return f'<tool_call>{{"name": "search", "arguments": {{"query": "{query}"}}}}</tool_call>'


def written(tokenizer: Tokenizer, text: str, ended: bool = True) -> list[int]:
    return [*tokenizer.encode(text), *([tokenizer.eos_ids[0]] if ended else [])]


def episodes_of(environment, rows, tokenizer=CHAT, **settings) -> Episodes:
    pool = EnvironmentPool(environment, EnvironmentLimits(isolate=False))
    names = ("max_turns", "max_observation_tokens", "refuses_long")
    limits = {name: settings.pop(name) for name in names if name in settings}
    limits = Environment(pool, **{"max_turns": 5, "max_observation_tokens": 60} | limits)
    of_run = {"tokenizer": tokenizer, "max_prompt_tokens": 200, "step": 3} | settings
    return Episodes(rows=rows, environment=limits, **of_run)


def play(episodes: Episodes, turns: dict[int, list[str]], tokenizer=CHAT, cut: int = -1) -> dict:
    """Let each row say its turns. Return row -> the texts that followed them.

    The turn `cut` of row 0 is cut off.
    """
    said = {row: 0 for row in turns}
    answers: dict[int, list[str]] = {row: [] for row in turns}
    open_rows = set(turns)

    def say(row: int) -> None:
        stopped = not (row == 0 and said[row] == cut)
        episodes.on_turn(row, written(tokenizer, turns[row][said[row]], stopped), stopped)
        said[row] += 1

    for row in turns:
        say(row)
    while open_rows:
        for row, token_ids in episodes.poll(wait=True).items():
            if token_ids is None:
                open_rows.discard(row)
            else:
                answers[row].append(tokenizer.decode(token_ids, skip_special=False))
                say(row)
    return answers


def test_tools_answer_until_a_turn_calls_none():
    rows = [
        {"prompt": [{"role": "user", "content": "who?"}], "found": "x", "first": " Begin."},
        {"prompt": "never wrapped", "found": "y"},
    ]
    with episodes_of(Store, rows, group_size=2, max_observation_tokens=200) as episodes:
        prompts = episodes.begin()
        assert CHAT.decode(prompts[0], skip_special=False) == (
            "tools: search <bos>user\nwho? Begin.<eos>\n<bos>assistant\n"
        )
        assert prompts[0] == prompts[1]
        assert CHAT.decode(prompts[2]) == "never wrapped"
        turns = {
            0: ["I " + call("a"), call("b") + call("c"), "done"],
            1: ["at once"],
            2: ["<tool>search: q</tool>", "end"],
            3: ["<tool>search</tool> <tool>fly()</tool>", "end"],
        }
        answers = play(episodes, turns)
        results = episodes.by_row
    assert answers == {
        0: [
            "\n<bos>tool\na is x<eos>\n<bos>assistant\n",
            "\n<bos>tool\nb is x<eos>\n<bos>tool\nc is x<eos>\n<bos>assistant\n",
        ],
        1: [],
        2: ["<result>q is y</result>"],
        3: answers[3],
    }
    assert "The call cannot be read: it is neither" in answers[3][0]
    assert "Tool fly not found." in answers[3][0]
    first = results[0]
    assert first.prompt == [{"role": "user", "content": "who? Begin."}]
    roles = [message["role"] for message in first.messages]
    assert roles == ["assistant", "tool", "assistant", "tool", "tool", "assistant"]
    assert first.messages[0]["content"] == "I"
    assert first.messages[0]["tool_calls"][0]["function"]["arguments"] == {"query": "a"}
    assert first.messages[-1] == {"role": "assistant", "content": "done"}
    assert (len(first.turn_rewards), first.tool_calls, first.errors, first.fault) == (3, 3, 0, "")
    assert first.observation_tokens == sum(
        len(CHAT.encode(text, special=True)) for text in answers[0]
    )
    assert [results[row].reward for row in range(4)] == [3.0, 0.0, 1.0, 0.0]
    assert (results[3].tool_calls, results[3].errors) == (1, 2)
    assert first.state == {"found": "x", "searches": 3}


def test_the_time_of_an_episode_is_that_of_what_it_waits_for():
    with episodes_of(Store, [{"prompt": "a", "found": "x"}] * 2) as episodes:
        episodes.begin()
        turns = {0: ["<tool>search: slow</tool>", "end"], 1: ["end"]}
        play(episodes, turns)
        results = episodes.by_row
    kinds = [kind for kind, _ in results[0].log.waits]
    assert kinds == ["reset", "policy", "call", "policy", "reward"]
    assert results[0].log.waits[2][1] >= 0.3
    assert "call" not in dict(results[1].log.waits)


def test_a_game_ends_when_it_is_done():
    rows = [{"prompt": "", "start": 5}, {"prompt": "count ", "start": 9}]
    with episodes_of(Countdown, rows, PLAIN, stop_strings=["."], max_turns=3) as episodes:
        prompts = episodes.begin()
        assert [PLAIN.decode(prompts[row]) for row in (0, 1)] == ["5:", "count 9:"]
        answers = play(episodes, {0: ["2", "3"], 1: ["1.", "1.", "1."]}, PLAIN)
        results = episodes.by_row
    assert answers == {0: [" 3:"], 1: [" 8:", " 7:"]}
    assert results[0].turn_rewards == [0.0, 1.0]
    assert results[1].turn_rewards == [0.0, 0.0, 0.0]
    assert results[0].reward is None
    assert results[1].state["left"] == 6, "the last turn that is allowed acts too"
    assert results[0].state["seed"] != results[1].state["seed"]


def test_the_episodes_of_a_group_share_their_seed():
    seeds = []
    for first_row_id in (0, 4):
        rows = [{"prompt": "", "start": 1}]
        with episodes_of(
            Countdown, rows, PLAIN, group_size=2, first_row_id=first_row_id
        ) as episodes:
            episodes.begin()
            play(episodes, {0: ["1"], 1: ["1"]}, PLAIN)
            seeds.append([result.state["seed"] for result in episodes.by_row.values()])
    assert seeds[0][0] == seeds[0][1]
    assert seeds[0][0] != seeds[1][0]


def test_a_turn_that_is_cut_off_ends_the_episode():
    rows = [{"prompt": [{"role": "user", "content": "?"}], "found": "x"}]
    with episodes_of(Store, rows) as episodes:
        episodes.begin()
        assert play(episodes, {0: [call("a"), call("b")]}, cut=1)[0] != []
        (result,) = episodes.by_row.values()
    assert (result.tool_calls, result.reward, len(result.turn_rewards)) == (1, 1.0, 2)
    with episodes_of(Countdown, [{"prompt": "", "start": 5}], PLAIN) as episodes:
        episodes.begin()
        play(episodes, {0: ["5"]}, PLAIN, cut=0)
        (result,) = episodes.by_row.values()
    assert (result.turn_rewards, result.state["left"]) == ([0.0], 5)


@pytest.mark.parametrize(
    ("row", "turns", "fault"),
    [
        ({"fail": True}, ["hello"], "ValueError: no store"),
        ({"first": "x" * 300}, ["hello"], "the text that `reset` returned: a prompt has "),
        ({"found": "nan"}, [call("a"), "end"], "it returned NaN"),
        ({"found": "x" * 61}, [call("a")], "an observation has 86 tokens, and 60 are allowed"),
    ],
)
def test_a_fault_ends_its_own_episode_without_a_reward(row, turns, fault):
    prompt = [{"role": "user", "content": "?"}]
    rows = [{"prompt": prompt, **row}, {"prompt": prompt, "found": "x"}]
    with episodes_of(Store, rows, refuses_long=True) as episodes:
        episodes.begin()
        play(episodes, {0: turns, 1: [call("a"), "end"]})
        results = episodes.by_row
    assert fault in results[0].fault
    assert results[0].reward is None
    assert (results[1].fault, results[1].reward) == ("", 1.0)


def test_polling_waits_for_nobody_and_only_local_rows_are_run():
    prompt = [{"role": "user", "content": "?"}]
    rows = [{"prompt": prompt, "found": "x"}, {"prompt": prompt, "found": "y"}]
    with episodes_of(Store, rows, group_size=2, local=slice(2, 4)) as episodes:
        assert sorted(episodes.begin()) == [2, 3]
        began = time.monotonic()
        episodes.on_turn(2, written(CHAT, call("slow")), True)
        episodes.on_turn(3, written(CHAT, call("fast")), True)
        (row,) = episodes.poll(wait=True)
        assert row == 3
        assert episodes.poll() == {}
        assert time.monotonic() - began < 0.3
        (row,) = episodes.poll(wait=True)
        assert row == 2
        for row in (2, 3):
            episodes.end(row)
        while any(episodes.poll(wait=True).values()):
            pass
        assert sorted(episodes.by_row) == [2, 3]


def test_what_does_not_fit_is_refused_before_a_run():
    rows = [{"prompt": [{"role": "user", "content": "x" * 300}]}]
    with (
        episodes_of(Store, rows) as episodes,
        pytest.raises(InputError, match="a prompt has 3"),
    ):
        episodes.begin()
    endless = characters(string.printable, TEMPLATE.replace("<eos>", ""))
    pool = EnvironmentPool(Store)
    require_fit(CHAT, pool, is_chat=True)
    require_fit(PLAIN, pool, is_chat=False)
    with pytest.raises(InputError, match="rewrites the assistant's turns"):
        require_fit(endless, pool, is_chat=True)


# --- long answers, and texts of tools ---


@pytest.mark.parametrize("length", [61, 5_000, 1_000_000])
def test_a_long_answer_is_cut(length):
    rows = [{"prompt": [{"role": "user", "content": "?"}], "found": "x" * length}]
    with episodes_of(Store, rows) as episodes:
        episodes.begin()
        answers = play(episodes, {0: [call("a"), "end"]})
        (result,) = episodes.by_row.values()
    assert answers[0] == [f"\n<bos>tool\na is {'x' * 27}...[cut]<eos>\n<bos>assistant\n"]
    # Reward functions see what the policy has read.
    assert result.messages[1]["content"] == f"a is {'x' * 27}...[cut]"
    assert (result.fault, result.observation_tokens, result.reward) == ("", 60, 1.0)


def test_of_several_answers_the_long_ones_are_cut():
    rows = [{"prompt": [{"role": "user", "content": "?"}], "found": "x"}]
    turn = call("a") + call("b" * 100) + call("c" * 80) + "<tool_call>{</tool_call>"
    with episodes_of(Store, rows, max_observation_tokens=120) as episodes:
        episodes.begin()
        answers = play(episodes, {0: [turn, "end"]})
        (result,) = episodes.by_row.values()
    first, second, third, error = [message["content"] for message in result.messages[1:5]]
    assert first == "a is x"
    assert second.endswith("b...[cut]")
    assert third.endswith("c...[cut]")
    assert abs(len(second) - len(third)) <= 1
    # Our own message counts as short: it is whole, and not a part of the limit.
    assert error.startswith("{'error': 'The call cannot be read: it is no JSON")
    assert len(answers[0]) == 1
    assert 100 <= result.observation_tokens - len(error) <= 120


class Loud:
    """Tools that answer what JSON or UTF-8 cannot write."""

    def reset(self, **row):
        self.state = {"half": "\ud800"}

    def say(self, what: str):
        """Say something.

        Args:
            what: What.
        """
        answers = {
            "half": "\ud800",
            "bytes": b"\xff",
            "nothing": None,
            "number": float("nan"),
            "dots": ...,
            "keys": {(1, 2): object},
            "deep": eval("[" * 90 + "]" * 90),
        }
        if what == "raise":
            raise RuntimeError("\ud800")
        if what == "worse":
            raise Unprintable
        return answers[what]


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


def test_no_answer_of_a_tool_ends_an_episode():
    rows = [{"prompt": [{"role": "user", "content": "?"}]}]
    words = ["half", "bytes", "nothing", "number", "dots", "keys", "deep", "raise", "worse", "?"]
    turns = [call(word).replace("search", "say").replace("query", "what") for word in words]
    unknown = '<tool_call>{"name": "%s", "arguments": {"\\u0000": []}}</tool_call>' % ("x" * 500)
    with episodes_of(Loud, rows, max_turns=20) as episodes:
        episodes.begin()
        answers = play(episodes, {0: [*turns, unknown, "end"]})
        (result,) = episodes.by_row.values()
    assert (result.fault, len(answers[0])) == ("", len(words) + 1)
    json.dumps([result.messages, result.state], ensure_ascii=False).encode("utf-8")


def test_a_template_whose_calls_cannot_be_read_is_refused_before_the_run():
    pool = EnvironmentPool(Store, EnvironmentLimits(isolate=False))
    unknown = characters(string.printable, TEMPLATE.replace("<tool_call>", "<<"))
    silent = characters(string.printable, TEMPLATE.replace("m.tool_calls or []", "[]"))
    with pytest.raises(InputError, match="cannot be read in the form"):
        require_fit(unknown, pool, is_chat=True)
    with pytest.raises(InputError, match="nothing tells the model how to call"):
        require_fit(silent, pool, True, [{"role": "user", "content": "who?"}])
    require_fit(silent, pool, True, f"Search, as in {call('a')}. Who?")
    # What `reset` returns may explain the calls; if it does not, each episode says why it ended.
    require_fit(silent, pool, True)
    for first, fault in [("", "nothing tells the model how to call"), (f" As {call('a')}.", "")]:
        rows = [{"prompt": [{"role": "user", "content": "who?"}], "found": "x", "first": first}]
        with episodes_of(Store, rows, silent) as episodes:
            episodes.begin()
            play(episodes, {0: [call("b"), "x"]}, silent)
            (result,) = episodes.by_row.values()
        assert result.fault.startswith(fault)
        assert bool(result.fault) == bool(fault)
        assert result.tool_calls == (not fault)
