"""The shell on a dict of files: commands, tasks that can be done, and its tokenizer."""

from pathlib import Path

import numpy as np
import pytest

import tpu_rl
from tpu_rl import tokenizers
from tpu_rl.environments import contract
from tpu_rl.errors import InputError
from tpu_rl.tasks import mini_shell
from tpu_rl.tasks.mini_shell import (
    Carefulness,
    MiniShell,
    MiniShellData,
    MiniShellSource,
    Part,
    Problem,
    Shell,
)

FILES = {"bin/fig": "red", "etc/jam": "blue", "etc/nuts": "red"}
SOURCE = MiniShellSource(MiniShellData(max_parts=3))


def test_commands_do_what_those_of_a_shell_do():
    shell = Shell(["bin", "etc"], FILES)
    session = [
        ("ls", "bin etc"),
        ("ls etc", "jam nuts"),
        ("cat etc/jam", "blue"),
        ("find fig", "bin/fig"),
        ("grep red", "bin/fig\netc/nuts"),
        ("cd etc", ""),
        ("ls", "jam nuts"),
        ("cp jam ../bin", ""),
        ("mv nuts ../bin/rice", ""),
        ("echo gold > fig", ""),
        ("rm /bin/fig", ""),
        ("cd ..", ""),
    ]
    assert [(line, shell.run(line)) for line, _ in session] == session
    assert shell.files == {
        "etc/jam": "blue",
        "bin/jam": "blue",
        "bin/rice": "red",
        "etc/fig": "gold",
    }


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("", "bad command"),
        ("sudo rm bin/fig", "bad command"),
        ("echo gold bin/fig", "bad command"),
        ("mv bin/fig", "bad command"),
        ("ls bin/fig", "not found"),
        ("cat bin", "not found"),
        ("cd bin/fig", "not found"),
        ("rm bin", "not found"),
        ("mv bin/jam etc", "not found"),
        ("cp bin/fig lib/fig", "not found"),
        ("echo gold > bin", "not found"),
        ("echo gold > lib/fig", "not found"),
        ("find rice", "not found"),
    ],
)
def test_commands_that_cannot_be_done_change_nothing(command, printed):
    shell = Shell(["bin", "etc"], FILES)
    assert shell.run(command) == printed
    assert shell.files == FILES


def test_tasks_can_be_done_through_the_shell_and_ask_for_a_change():
    """What a task means is computed without the shell."""
    kinds = set()
    for index in range(200):
        row = SOURCE[index]
        assert row["goal"] != row["files"]
        generator = np.random.default_rng(index)
        problem = mini_shell.draw(SOURCE.config, generator)
        if not mini_shell.is_solvable(problem):
            continue
        kinds |= {part.kind for part in problem.parts}
        environment = MiniShell()
        environment.reset(problem.directories, problem.files, problem.goal() or {})
        assert environment.get_reward() == 0.0
        transcript, files, _ = mini_shell.use(problem, Carefulness(), generator)
        assert files == problem.goal()
        assert transcript.endswith("exit\n")
    assert len(kinds) == 6


@pytest.mark.parametrize(
    "part",
    [
        Part("move", file="jam", directory="etc"),
        Part("rename", file="jam", new="nuts"),
        Part("remove", file="rice"),
        Part("remove_with", word="red"),
        Part("write", directory="bin", new="fig", word="red"),
    ],
)
def test_tasks_without_one_meaning_are_left_out(part):
    assert not mini_shell.is_solvable(Problem(["bin", "etc"], FILES, [part]))


def test_an_episode_replays_its_demonstration():
    """The careless user's transcript is what the policy and the environment write in turn."""
    rewards = []
    for index in range(100):
        row = MiniShellSource()[index]
        environment = MiniShell()
        assert contract.describe(environment, "").form == "game"
        assert contract.reset(environment, row, 0) is None
        transcript = ""
        remaining = row["completion"]
        done = False
        while not done:
            command = remaining.partition("\n")[0]
            observation, reward, done = contract.step(environment, command)
            assert reward is None
            transcript += f"{command}\n{observation}"
            remaining = row["completion"].removeprefix(transcript)
        assert transcript == row["completion"]
        rewards.append(environment.get_reward())
    assert 0.3 < np.mean(rewards) < 0.7


def test_training_and_evaluation_share_no_task():
    splits = {
        split: {str(MiniShellSource(split=split)[index]) for index in range(200)}
        for split in ("train", "eval")
    }
    assert not splits["train"] & splits["eval"]
    assert MiniShellSource(seed=1)[0] != MiniShellSource(seed=2)[0]
    assert MiniShellSource()[5] == MiniShellSource()[5]


def test_the_tokenizer_has_a_token_for_each_word():
    tokenizer = tokenizers.load(Path(tpu_rl.__file__).parent / "pretrained" / "mini_shell")
    for index in range(100):
        row = SOURCE[index]
        text = row["prompt"] + row["completion"]
        token_ids = tokenizer.encode_prompt(text)
        assert tokenizer.decode(token_ids) == text
        assert len(tokenizer.encode_prompt(row["prompt"])) <= 48
    words = [*mini_shell.MARKS, *mini_shell.DIRECTORIES, *mini_shell.FILES, *mini_shell.WORDS]
    for word in (*words, *mini_shell.OTHERS):
        assert len(tokenizer.encode_prompt(word)) == 1


def test_impossible_settings_are_refused():
    with pytest.raises(InputError, match="directories is 9"):
        MiniShellData(directories=9)
