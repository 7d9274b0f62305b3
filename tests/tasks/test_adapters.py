"""Environments of other packages as text games. What is not installed is skipped."""

import importlib
import importlib.util
import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from tpu_rl.environments import contract, named
from tpu_rl.errors import InputError, MachineError
from tpu_rl.tasks import adapters
from tpu_rl.tasks.adapters import openenv, reasoning_gym, tunix
from tpu_rl.tasks.reasoning import SHORT, ReasoningGymData
from tpu_rl.wings import TASKS


def needs(package: str):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


def one_of(name: str):
    """Return an instance of an environment that a name names."""
    (factory,) = named.load(name).values()
    instance = factory()
    assert contract.describe(instance, name).form == "game"
    return instance


def test_episodes_have_their_own_global_random_numbers():
    def draw(private, count):
        with private():
            return [(random.random(), np.random.random()) for _ in range(count)]

    alone = adapters.PrivateRandom(3)
    expected = draw(alone, 4)
    first, other = adapters.PrivateRandom(3), adapters.PrivateRandom(4)
    random.seed(1)
    drawn = draw(first, 2)
    outside = random.random()
    different = draw(other, 3)
    assert drawn + draw(first, 2) == expected
    assert different[:2] != expected[:2]
    random.seed(1)
    assert random.random() == outside, "the numbers of other code go on"


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gem", None)
    with pytest.raises(MachineError, match="needs the package gem") as error:
        one_of("gem:game:GuessTheNumber-v0-easy")
    assert error.value.fix == "pip install gem-llm"


@needs("gymnasium")
def test_gymnasium():
    game = one_of("gymnasium:FrozenLake-v1")
    first = contract.reset(game, {"prompt": "p"}, seed=5)
    assert first == "0"
    observation, reward, done = contract.step(game, "I go to 7")
    assert "must be one of Discrete(4)" in observation
    played = [contract.step(game, str(move)) for move in (2, 1, 1)]
    contract.reset(game, {}, seed=5)
    assert [contract.step(game, str(move)) for move in (2, 1, 1)] == played
    with pytest.raises(ValueError, match="they must be Discrete or Text"):
        one_of("gymnasium:Pendulum-v1")


@needs("textarena")
def test_textarena():
    game = one_of("textarena:GuessTheNumber-v0")
    assert "Guess The Number" in (contract.reset(game, {}, seed=5) or "")
    number = game._inner.game_number
    wrong = number - 1 if number > 1 else number + 1
    observation, reward, done = contract.step(game, f"I say [{wrong}]")
    assert observation == f"The target number is {'higher' if wrong < number else 'lower'}."
    assert (reward, done) == (0.0, False)
    assert contract.step(game, f"I say [{number}]")[1:] == (1.0, True)
    contract.reset(game, {}, seed=5)
    assert game._inner.game_number == number
    with pytest.raises(AssertionError, match="number of players"):
        one_of("textarena:TicTacToe-v0")


@needs("gem")
def test_gem():
    game = one_of("gem:game:GuessTheNumber-v0-easy")
    assert "Guess The Number" in (contract.reset(game, {}, seed=5) or "")
    observation, reward, done = contract.step(game, "\\boxed{1}")
    assert isinstance(reward, float)


@needs("skyrl_gym")
def test_skyrl_gym():
    game = one_of("skyrl_gym:gsm8k")
    row = {"prompt": "1+1?", "reward_spec": {"ground_truth": "2"}}
    assert contract.reset(game, row, seed=5) is None
    assert contract.step(game, "#### 2") == ("", 1.0, True)


class TheirEnv:
    """In the form of Tunix's BaseEnv."""

    @classmethod
    def from_dict(cls, row):
        game = cls()
        game.goal = row["goal"]
        return game

    def reset(self):
        return {"text": f"go to {self.goal}"}, {}

    def step(self, action):
        return {"text": "there", "more": 1}, float(action == self.goal), True, {}


def test_tunix():
    game = tunix.adapt(TheirEnv, show="text")()
    assert contract.reset(game, {"goal": "x"}, seed=0) == "go to x"
    assert contract.step(game, "x") == ("there", 1.0, True)
    unclear = tunix.adapt(TheirEnv)()
    contract.reset(unclear, {"goal": "x"}, seed=0)
    with pytest.raises(ValueError, match="choose one, `show`"):
        contract.step(unclear, "x")


# --- reasoning-gym ---


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1</answer> no, <answer> 2 </answer>", "2"),
        ("I think.\nAnswer: 7", "7"),
        (" 7 ", "7"),
    ],
)
def test_the_answer_is_read_before_it_is_scored(text, answer):
    assert reasoning_gym.answer_in(text) == answer


@needs("reasoning_gym")
def test_reasoning_gym():
    task = one_of("reasoning_gym:chain_sum")
    question = contract.reset(task, {"index": 700}, seed=0)
    assert contract.reset(one_of("reasoning_gym:chain_sum"), {"index": 700}, seed=9) == question
    assert contract.reset(task, {"index": 701}, seed=0) != question
    answer = task._entry["answer"]
    assert contract.step(task, f"<answer>{answer}</answer>") == ("", 1.0, True)
    assert contract.describe(task, "").name == "chain_sum"
    factoring = one_of("reasoning_gym:prime_factorization")
    contract.reset(factoring, {}, seed=3)
    assert contract.step(factoring, "zzz") == ("", 0.0, True), "its scorer raises"
    assert sorted(map(str, named.load("reasoning_gym:chain_sum, acre"))) == ["acre", "chain_sum"]
    for name in ("game_of_life_halting", "chain_sums"):
        with pytest.raises(InputError, match=f"reasoning_gym:{name} cannot be used"):
            named.load(f"reasoning_gym:{name}")


def test_rows_name_their_task_and_question():
    data = ReasoningGymData(tasks=("gcd", "lcm"), questions=700, chat=False)
    train, other = (TASKS["reasoning_gym"].train_rows(data, seed) for seed in (0, 1))
    assert len(train) == 1400
    assert [train[index]["environment"] for index in range(3)] == ["gcd", "lcm", "gcd"]
    assert train[0]["index"] == train[1]["index"] == train[2]["index"] - 1
    assert train[0]["index"] % reasoning_gym.CHUNK == 0, "few data sets make all questions"
    assert train[0]["index"] != other[0]["index"]
    evaluation = TASKS["reasoning_gym"].evaluation_rows(data, 10)
    assert evaluation[0]["index"] == reasoning_gym.EVALUATION_START > train[1399]["index"]
    assert evaluation[0]["prompt"] == data.instruction
    with pytest.raises(InputError, match="none twice"):
        ReasoningGymData(tasks=("gcd", "gcd"))


@needs("reasoning_gym")
def test_the_short_tasks_score_right_answers_alone():
    factories = named.load(f"reasoning_gym:{','.join(SHORT)}")
    for name, factory in factories.items():
        task = factory()
        assert len(contract.reset(task, {"index": 3}, seed=0) or "") < 300
        answer = task._entry["answer"]
        assert contract.step(task, f"Answer: {answer}") == ("", 1.0, True), name
        assert (contract.step(task, "zzz")[1] or 0) < 0.1, name


@pytest.mark.slow
@needs("reasoning_gym")
def test_every_task_of_reasoning_gym_gives_its_own_answer_the_highest_score():
    names = importlib.import_module("reasoning_gym.factory").DATASETS
    for name in sorted(set(names) - set(reasoning_gym.REFUSED)):
        task = one_of(f"reasoning_gym:{name}")
        contract.reset(task, {"index": 12345}, seed=0)
        assert contract.step(task, "zzz")[1] <= 0.05, name
        answer = task._entry["answer"]
        if answer is not None:
            assert contract.step(task, f"<answer>{answer}</answer>")[1] == 1.0, name


# --- OpenEnv ---


@pytest.mark.parametrize(
    ("properties", "field"),
    [
        ({"message": {"type": "string"}, "metadata": {"type": "object"}}, "message"),
        ({"a": {"type": "string"}, "b": {"type": "string"}}, None),
        ({"move": {"type": "integer"}}, None),
    ],
)
def test_the_text_of_an_action_is_its_only_text_field(properties, field):
    assert openenv._text_field({"properties": properties}) == field


class SchemaServer(BaseHTTPRequestHandler):
    def do_GET(self):
        text = json.dumps({"action": {"properties": {"message": {"type": "string"}}}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


class FakeSocket:
    """Answers as a server of OpenEnv does."""

    def send(self, text):
        message = json.loads(text)
        self.reply = {"type": "observation", "data": {"reward": None, "done": False}}
        if message["type"] == "reset":
            self.seed = message["data"]["seed"]
            self.reply["data"]["observation"] = {"echoed_message": f"seed {self.seed}"}
        elif message["data"]["message"] == "wrong":
            self.reply = {"type": "error", "data": {"message": "no such move"}}
        else:
            observation = {"echoed_message": message["data"]["message"], "length": 2}
            self.reply["data"] = {"observation": observation, "reward": 0.5, "done": True}

    def recv(self):
        return json.dumps(self.reply)


def test_openenv(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), SchemaServer)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    opened = []

    class Client:
        @staticmethod
        def connect(socket, open_timeout):
            opened.append(socket)
            return FakeSocket()

    monkeypatch.setattr(adapters, "require", lambda *_: Client)
    game = one_of(f"openenv:{address}")
    assert contract.reset(game, {}, seed=5) == "seed 5"
    assert contract.step(game, "hi") == ("hi", 0.5, True)
    with pytest.raises(ValueError, match="the server answers: no such move"):
        contract.step(game, "wrong")
    assert opened == [address.replace("http", "ws") + "/ws"]
    server.shutdown()
