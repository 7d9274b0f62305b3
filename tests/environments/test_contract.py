"""What a class must be to be an environment, and the schemas of its tools."""

import enum
import io
import json
import re
from base64 import b64encode
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

from tpu_rl.environments import contract, named, observations, tool_schemas
from tpu_rl.errors import InputError
from tpu_rl.tasks import pictures


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Tools:
    """Methods with every kind of hint and docstring."""

    def plain(self, first: int, second: float = 1.5):
        """Add two numbers.

        Args:
            first: One number.
            second (`float`, *optional*): Another number,
                described in two lines.
        """

    def nested(
        self, items: list[dict[str, int]], pair: tuple[int, str], any_value: Any, bare: list
    ) -> dict[str, list[str]]:
        """
        Take containers.

        They may be nested. See https://example.com: a colon.

        Args:
            items: A list.
              deeper: still the list.
            pair: A pair.

            any_value: Anything.
            bare: A list of anything.

        Returns:
            A mapping.

        Raises:
            ValueError: never.
        """
        raise NotImplementedError

    async def optional(
        self,
        text: str | None,
        either: int | str | None = None,
        color: Color = Color.RED,
        size: Literal["s", 2] = "s",
        mixed: list[int] | str = "",
    ) -> str:
        """Choose.

        Args:
            text: A text or nothing.
            either: One of two.
            color: A color.
            size: A size.
            mixed: A list or a text.

        Returns:
            The text.
        """
        raise NotImplementedError

    def choice(self, drink: str) -> bytes:
        """Drink.

        Args:
            drink: The drink (choices: ["tea", " coffee "])
        """
        raise NotImplementedError

    def none(self):
        """Do nothing."""


@pytest.mark.parametrize("name", ["plain", "nested", "optional", "choice", "none"])
def test_schemas_are_those_of_transformers(name):
    from transformers.utils import get_json_schema

    schema = tool_schemas.schema_of(getattr(Tools, name), skip_first=True)
    assert schema == get_json_schema(getattr(Tools(), name))


def no_docstring(x: int): ...


def no_hint(x):
    """Take x.

    Args:
        x: A value.
    """


def no_description(x: int):
    """Take x."""


def odd_hint(x: range):
    """Take x.

    Args:
        x: A range.
    """


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (no_docstring, "it has no docstring"),
        (no_hint, "its parameter 'x' has no type hint"),
        (no_description, "its docstring does not describe the parameter 'x'"),
        (odd_hint, "JSON has no type for the hint <class 'range'>"),
    ],
)
def test_a_method_that_is_no_tool_is_refused_by_its_class(function, reason):
    environment = type("Env", (), {"reset": lambda self: None, "act": staticmethod(function)})
    with pytest.raises(InputError, match="the method `act` of Env is no tool") as error:
        contract.describe(environment(), "mine.py:Env")
    assert error.value.what.endswith(reason)
    assert error.value.where == "mine.py:Env"


def test_a_class_without_reset_is_refused():
    with pytest.raises(InputError, match="the environment Tools has no method `reset`"):
        contract.describe(Tools(), "mine.py:Tools")


def test_an_unknown_name_is_refused_with_what_there_is():
    with pytest.raises(InputError, match="unknown environment 'serch'") as error:
        named.load("serch")
    assert re.match(r"did you mean search\?.*FILE.py:Class", error.value.fix)


class Guess:
    """A text game."""

    def reset(self, answer: str, seed: int, hint: str = ""):
        self.answer = answer
        self.first = f"seed {seed}, hint {hint}"
        return self.first, {}

    def step(self, text):
        return "right" if text == self.answer else "wrong", float(text == self.answer), True, {}

    def render(self):
        raise AssertionError("no tool")


class StepTool:
    """TRL allows a tool of this name."""

    def reset(self, **row) -> str | None: ...

    def step(self, action: str) -> str:
        """Act.

        Args:
            action: The action.
        """
        return action


def test_a_step_is_a_game_unless_it_is_a_tool():
    game = contract.describe(Guess(), "")
    assert (game.form, game.tools, game.columns) == ("game", [], ["answer"])
    tools = contract.describe(StepTool(), "")
    assert (tools.form, [tool["function"]["name"] for tool in tools.tools]) == ("tools", ["step"])
    declared = type("Declared", (StepTool,), {"text_game": True})
    assert contract.describe(declared(), "").form == "game"


def test_reset_gets_the_columns_that_it_names():
    row = {"answer": "7", "prompt": "?", "hint": "h"}
    assert contract.reset(Guess(), row, seed=3) == "seed 3, hint h"
    assert contract.reset(Guess(), {**row, "seed": 5}, seed=3) == "seed 5, hint h"

    class Asks:
        def reset(self, max_turns, is_evaluation):
            return f"{max_turns} {is_evaluation}"

    assert contract.reset(Asks(), row, seed=3, max_turns=2, is_evaluation=True) == "2 True"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (("text", 1, True, {}), ("text", 1.0, True)),
        (("text", None, False, True, {}), ("text", None, True)),
        ((7, 0.5, False, False, {}), ("7", 0.5, False)),
        (
            {"observations": [{"role": "user", "content": "a"}], "reward": 1, "done": False},
            ("a", 1.0, False),
        ),
        ({"observation": None, "reward": 0.0, "done": True}, ("", 0.0, True)),
        (("x" * 1_000_001, 0.0, True, {}), ("x" * 1_000_000 + "...[cut]", 0.0, True)),
        (("\ud800a", 0.0, True, {}), ("\ufffda", 0.0, True)),
    ],
)
def test_every_form_of_a_step_is_read(value, expected):
    game = type("Game", (), {"step": lambda self, text: value})()
    assert contract.step(game, "") == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "`step` returned 'text' and not"),
        (("text", float("nan"), True, {}), "it returned NaN"),
        ({"reward": 1.0, "observation": ""}, "`step` returned a mapping without 'done'"),
    ],
)
def test_a_step_that_returns_something_else_says_so(value, message):
    game = type("Game", (), {"step": lambda self, text: value})()
    with pytest.raises(ValueError, match=message):
        contract.step(game, "")


def png(color="red", size=(4, 3)):
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, format="PNG")
    return file.getvalue()


DATA_URL = f"data:;base64,{b64encode(png()).decode()}"
RED = Image.new("RGB", (4, 3), "red")


@pytest.mark.parametrize(
    ("value", "text", "count"),
    [
        (RED, "M", 1),
        ([RED, "a", RED.convert("P")], "MaM", 2),
        ([{"type": "image", "image": RED}, {"type": "text", "text": "see"}], "Msee", 1),
        ([{"type": "image", "image": png()}], "M", 1),
        ({"role": "tool", "content": [{"type": "text", "text": "a\ufffc"}, RED]}, "a\ufffdM", 1),
        ([{"type": "image_url", "image_url": {"url": DATA_URL}}], "M", 1),
    ],
)
def test_observations_may_have_images(value, text, count):
    class Shows:
        def step(self, said):
            return value, 1.0, False, {}

        def look(self):
            return value

    observation, _, _ = contract.step(Shows(), "a")
    sent = json.loads(json.dumps(observation))
    received, images = observations.received(sent)
    assert received.replace(observations.MARK, "M") == text
    assert len(images) == count
    for image in images:
        np.testing.assert_allclose(np.asarray(Image.open(io.BytesIO(image)))[2, 3], [255, 0, 0])
    [(_, content, is_error)] = contract.call(Shows(), ["look"], [("look", {})])
    assert (content, is_error) == (observation, False)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([{"type": "image"}], "NoneType"),
        ([{"type": "image", "image": b"no picture"}], "cannot identify"),
        ([{"type": "image", "image": "path.png"}], "image that cannot be read"),
        ([RED] * 17, "17 images"),
        (Image.new("1", (5000, 4000)), "5000 x 4000"),
    ],
)
def test_images_that_cannot_be_read_are_faults(value, words):
    class Shows:
        def look(self):
            return value

    with pytest.raises(contract.Fault, match=words):
        contract.call(Shows(), ["look"], [("look", {})])


def test_a_coarse_picture_does_not_tell_the_answer_and_a_look_does():
    source = pictures.PicturesSource(pictures.PicturesData(questions="look"), "train", 40)
    coarse = {}
    for row in source:
        game = pictures.PictureLook()
        game.reset(**row)
        color = row["prompt"].split()[1].strip("?")
        observation, reward, done, _ = game.step(row["completion"])
        assert (observation[1:], reward, done) == (["\n"], None, False)
        cell = np.asarray(observation[0])
        shape = {"square": 36, "cross": 32, "bar": 24}[row["answer"]]
        assert (cell == pictures.COLORS[color]).all(-1).sum() == shape * 16
        assert game.step(row["answer"])[1:3] == (1.0, True)
        assert game.step("none")[1:3] == (0.0, True)
        picture = np.asarray(Image.open(io.BytesIO(row["images"][0])))
        coarse.setdefault(row["answer"], set()).add((picture == pictures.COLORS[color]).sum())
    assert coarse["square"] == coarse["cross"] == coarse["bar"]
    steps = pictures.PicturesSource(source.config, "train", 2, shows_steps=True)
    assert [len(row["images"]) for row in steps] == [1, 2]
    assert steps[1]["prompt"].count("\ufffc") == 2
    assert steps[1]["completion"].strip() == steps[1]["answer"]


# --- states of episodes that go on ---


@pytest.mark.parametrize(
    "state", [None, {"a": (1,)}, {1: 2}, {"a": float("nan")}, {"a": {1}}, {"a": np.zeros(2)}]
)
def test_a_state_that_json_would_change_is_refused(state):
    class Environment:
        def __getstate__(self):
            return state

    with pytest.raises(ValueError, match="`__getstate__` returned"):
        contract.saved_state(Environment())


def test_a_saved_state_is_a_copy():
    class Environment(contract.PlainState):
        def __init__(self):
            self.seen = [1, 1.5, "a", None, True, {"b": []}]

    environment = Environment()
    saved = contract.saved_state(environment)
    environment.seen.append(2)
    assert saved == {"seen": [1, 1.5, "a", None, True, {"b": []}]}
