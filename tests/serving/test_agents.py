"""Agents: programs in other processes that talk to the policy, and the rollouts of what they do."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures import several
from tests.fixtures.runs import TINY, digest, rows_of
from tpu_rl import tokenizers
from tpu_rl.commands import compose, config
from tpu_rl.errors import InputError
from tpu_rl.experience.source import from_scored
from tpu_rl.losses.log_probs import token_log_probs
from tpu_rl.rollout import branches, records
from tpu_rl.rollout.engine import RolloutRequest
from tpu_rl.sampler import Turn
from tpu_rl.serving.app import EpisodeAccount
from tpu_rl.serving.protocol import Options
from tpu_rl.train import packing

AGENTS = '''
import asyncio
import json
import urllib.request

def ask(base_url, api_key, **body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + api_key}
    data = json.dumps(body).encode()
    request = urllib.request.Request(base_url + "/completions", data, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["token_ids"]

def ids_of(text):
    return ["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789+-*=;#"].index(text)

async def once(row, base_url, api_key):
    tokens = await asyncio.to_thread(ask, base_url, api_key, prompt=row["prompt"])
    return float(len(tokens))

async def several(row, base_url, api_key):
    """Two turns, then the first prompt again, and then two calls at once. One row fails."""
    first = row["ids"]
    answer = await asyncio.to_thread(ask, base_url, api_key, prompt=first, max_tokens=20)
    if row["answer"] == "3":
        raise ValueError("out of order")
    more = [*first, *answer, *first[:2]]
    await asyncio.to_thread(ask, base_url, api_key, prompt=more, max_tokens=9)
    await asyncio.to_thread(ask, base_url, api_key, prompt=first, max_tokens=5)
    calls = [
        asyncio.to_thread(ask, base_url, api_key, prompt=[*first[:3], number], max_tokens=4)
        for number in (5, 6)
    ]
    await asyncio.gather(*calls)
    return None if row["answer"] == "5" else 2.0

async def branching(row, base_url, api_key):
    """Two calls at once, and a third after them, which take different times."""
    async def one(number):
        prompt = row["prompt"] + str(number)
        tokens = await asyncio.to_thread(ask, base_url, api_key, prompt=prompt, max_tokens=8)
        await asyncio.sleep(0.1 * (hash(api_key) % 3))
        return len(tokens)
    lengths = await asyncio.gather(one(1), one(2))
    return float(await one(lengths[0] % 10))

def endless(row, base_url, api_key):
    """Repeats what was said until no room is left, and does not expect the refusal."""
    prompt = row["prompt"]
    while True:
        prompt += prompt + str(len(ask(base_url, api_key, prompt=prompt)))

def wordy(row, base_url, api_key):
    ask(base_url, api_key, prompt="1" * 500)
'''
ROWS = [{"prompt": f"{n}+{n + 2}-1=", "answer": str(2 * n + 1)} for n in range(4)]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("agents") / "my_agent.py"
    file.write_text(AGENTS)
    return file


@pytest.fixture(scope="module")
def context_of(file):
    """Return (run, its params) by flags."""
    known = {}

    def make(*flags: str):
        if flags not in known:
            run_config = config.parse(
                [
                    "arithmetic_grpo",
                    "--batch.group-size=2",
                    "--sampling.max-new-tokens=64",
                    f"--run-dir={file.parent / 'run'}",
                    *flags,
                ]
            )
            mesh = compose.make_mesh(run_config.mesh)
            known[flags] = compose.make_context(run_config, file.parent / "run", mesh)
        return known[flags]

    return make


def roll_out(made, rows):
    context, params = made
    with jax.set_mesh(context.mesh):
        return compose.rollout_engine(context).roll_out(params, RolloutRequest(rows, step=1))


@pytest.mark.slow
def test_an_agent_of_one_call_samples_what_a_single_turn_does(context_of, file):
    alone = roll_out(context_of(), ROWS)
    flags = ("--sampling.max-turns", "1")
    scored = roll_out(context_of("--reward", "--agent", f"{file}:once", *flags), ROWS)
    assert scored.rewards.tolist() == scored.lengths.tolist()
    rollout = scored.rollout
    assert rollout.episode_id is None
    for name in ("tokens", "action_mask", "birth_key", "truncated", "group_id"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(alone.rollout, name))
    np.testing.assert_allclose(rollout.log_probs, alone.rollout.log_probs, atol=1e-5)
    assert rollout.parent is None


@pytest.mark.slow
def test_calls_become_rows_with_the_trainers_log_probs(context_of, file):
    made = context_of("--reward", "arithmetic", "--agent", f"{file}:several")
    context, params = made
    rows = [{**row, "ids": context.language.tokenizer.encode(row["prompt"])} for row in ROWS]
    scored = roll_out(made, rows)
    rollout = scored.rollout
    # Two turns; the prompt again; two helpers, which share three tokens with it.
    names = [f"{episode}{'abcd'[:n]}" for episode, n in enumerate([4, 4, 1, 1, 4, 4, 4, 4])]
    assert rollout.episode_id.tolist() == [int(name[0]) for name in names for _ in name[1:]]
    assert rollout.group_id.tolist() == [int(e) // 2 for e in rollout.episode_id]
    prompt = len(rows[0]["ids"])
    assert rollout.parent[:8].tolist() == [0, 0, 0, 0, 0, 4, 4, 4]
    assert rollout.shared[:8].tolist() == [0, prompt, 3, 3, prompt, prompt, 3, 3]
    mask = rollout.action_mask
    for row, (parent, shared) in enumerate(zip(rollout.parent, rollout.shared, strict=True)):
        np.testing.assert_array_equal(rollout.tokens[row, :shared], rollout.tokens[parent, :shared])
        assert not mask[row, :shared].any()
    one_per_row = packing.one_per_row(jnp.asarray(rollout.tokens), jnp.asarray(mask), len(mask))
    packed = jax.tree.map(lambda leaf: leaf[0, 0], one_per_row)
    exact = token_log_probs(context.role("policy"), params, packed).log_probs
    assert np.abs(np.asarray(exact) - rollout.log_probs)[mask].max() <= 2e-5
    # The reward is once in an episode; --reward judges alone where the agent returned None.
    totals = np.bincount(rollout.episode_id, rollout.rewards.sum(1))
    own = np.array([2, 2, 0, 0, 0, 0, 2, 2])
    assert set(totals - own) <= {0.0, 1.0}
    assert ~rollout.scored[rollout.episode_id == 2].any()
    metrics = records.metrics(scored)
    assert metrics["env/branches"] == np.mean([4, 4, 1, 1, 4, 4, 4, 4])
    assert metrics["reward/errors"] == 2
    assert "out of order" in records.warnings(scored)[0]
    # Batches have few shapes.
    data = from_scored(scored, 1).data
    assert len(data.tokens) == 32
    assert not data.scored[26:].any()
    assert not data.action_mask[26:].any()
    again = roll_out(made, rows)
    jax.tree.map(np.testing.assert_array_equal, again.rollout, rollout)


@pytest.mark.slow
def test_an_episode_whose_conversation_is_full_is_truncated_and_no_fault(context_of, file):
    scored = roll_out(context_of("--reward", "--agent", f"{file}:endless"), ROWS)
    assert scored.rollout.scored.all()
    assert not scored.rollout.rewards.any()
    metrics = records.metrics(scored)
    assert (metrics["env/truncated"], metrics["env/errors"]) == (1, 0)


@pytest.mark.slow
def test_a_first_prompt_that_is_too_long_is_a_fault_with_its_length(context_of, file):
    with pytest.raises(InputError, match=r"its first prompt has 500 tokens, and .* at most \d+ "):
        roll_out(context_of("--reward", "--agent", f"{file}:wordy"), ROWS)


def test_bad_agents_are_one_message(context_of, file):
    run_config = context_of()[0].config
    changes = {
        "no function 'runn'": {"agent": f"{file}:runn"},
        "no such agent file": {"agent": "nowhere.py:run"},
    }
    for message, change in changes.items():
        with pytest.raises(InputError, match=message):
            compose.agent(dataclasses.replace(run_config, **change))


def test_rows_of_a_group_share_what_comes_before_their_first_actions():
    branch = branches.Branch(0, 0, [1, 2], [False, True], [0.0, -1.0], [0.0, -1.0])
    other = dataclasses.replace(branch, shared=1, tokens=[1, 3])
    keys = np.zeros((2, 2), np.uint32)
    rollout = branches.to_rollout([[branch, other], [branch]], keys, 2, 4, 0, 0)
    assert rollout.parent.tolist() == [0, 0, 0]
    assert rollout.shared.tolist() == [0, 1, 1]


PARTIAL = """
import random
import time

def uneven(row, base_url, api_key):
    \"""Asks one to five times, and notes what it does in a file beside this one.\"""
    calls = 1 + sum(map(ord, row["prompt"])) % 5
    with open(__file__ + ".txt", "a") as file:
        file.write("begin\\n")
    prompt = row["prompt"]
    total = 0
    for call in range(calls):
        answer = ask(base_url, api_key, prompt=prompt, max_tokens=5)
        time.sleep(random.choice([0, 0.1]))
        prompt += f"={len(answer)};"
        total += sum(answer)
    if calls == 4:
        raise OSError("the network is down")
    return float(total % 3)

def moody(row, base_url, api_key):
    \"""Asks for other prompts each time it is called.\"""
    prompt = row["prompt"] + str(random.randrange(10**6))
    for call in range(1 + sum(map(ord, row["prompt"])) % 5):
        prompt += f"={len(ask(base_url, api_key, prompt=prompt, max_tokens=5))};"
    return 1.0
"""


def partial_run(folder: Path, agent: str, steps: int) -> list[str]:
    """Run some steps, and return the lines of stderr."""
    (folder / "partial_agent.py").write_text(AGENTS + PARTIAL)
    command = [
        "launch/run.py",
        *TINY,
        "--agent",
        f"{folder / 'partial_agent.py'}:{agent}",
        "--rollout.partial=2",
    ]
    command += ["--evaluation.rows=0", "--sampling.max-new-tokens=64", "--batch.row-length=240"]
    command += ["--reward", "--reward-limits.fault-share=1", "--run-dir", str(folder / "run")]
    (ended,) = several.run(1, [*command, f"--steps={steps}"])
    assert ended.code == 0, ended.err
    return ended.err.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_episodes_that_go_on_are_the_same_after_a_stop(tmp_path):
    """Random pauses change nothing; a continued function is not called again without a stop."""
    digests = {}
    for name, stops in (("whole", [4]), ("parts", [2, 4])):
        (tmp_path / name).mkdir()
        for steps in stops:
            lines = partial_run(tmp_path / name, "uneven", steps)
            assert "did not ask again" not in str(lines)
        run_dir = tmp_path / name / "run"
        digests[name] = digest(run_dir)
        rows = rows_of(run_dir)[1:]
        assert [row["rollout/stale"] > 0 for row in rows] == [False, True, True, True]
        assert rows[-1]["reward/errors"] > 0
        assert all(row["reward/std"] > 0 for row in rows)
        samples = map(json.loads, (run_dir / "samples.jsonl").read_text().splitlines())
        assert any(sample["reward"] is None for sample in samples)
    assert digests["parts"] == digests["whole"]
    begun = (tmp_path / "whole" / "partial_agent.py.txt").read_text().splitlines()
    # Six groups in the first step, then those that the step before took.
    assert len(begun) == (6 + 3 * 4) * 4


@pytest.mark.nightly
def test_an_episode_that_cannot_be_replayed_begins_anew(tmp_path):
    assert "did not ask again" not in str(partial_run(tmp_path, "moody", 1))
    notes = [line for line in partial_run(tmp_path, "moody", 2) if "did not ask again" in line]
    assert notes
    assert all(line.endswith("it begins anew with the policy of step 2") for line in notes)
    last = rows_of(tmp_path / "run")[-1]
    assert (last["rollout/stale"], last["reward/errors"]) == (0, 0)


def test_calls_wait_for_their_round():
    """A call of a later round is decoded once it is allowed; calls at the same time are one."""

    async def go() -> int:
        waits = []
        account = EpisodeAccount(
            tokenizers.characters("ab"),
            itertools.count(),
            row_key=np.zeros(2, np.uint32),
            first_prompt=None,
            most_calls=9,
        )
        account.allow(0)

        async def call(prompt: list[int]) -> None:
            one = account.begin(prompt, Options())
            await account.admit(one)
            waits.append(prompt[0])
            await asyncio.sleep(0)
            account.end(one, Turn(0, prompt, *np.zeros((2, 1), np.float32), True))

        tasks = [asyncio.create_task(call([number])) for number in (1, 2)]
        await asyncio.sleep(0.01)
        assert (account.is_held, waits) == (True, [])
        account.allow(1)
        await asyncio.gather(*tasks)
        assert (account.is_held, account.num_rounds, sorted(waits)) == (False, 1, [1, 2])
        late = asyncio.create_task(call([3]))
        await asyncio.sleep(0.01)
        assert (account.is_held, account.num_rounds) == (True, 1)
        late.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await late
        # A client that gave up and asks again draws the same.
        again = account.begin([3], Options())
        assert again.repeats == 0
        account.end(again, None)
        return account.num_rounds

    assert asyncio.run(go()) == 1


RUN = [
    "launch/run.py",
    "arithmetic_grpo",
    "--batch.prompts=4",
    "--batch.group-size=2",
    "--sampling.max-new-tokens=64",
    "--reward",
    "arithmetic",
    "--evaluation.rows=0",
]


@pytest.mark.nightly
def test_two_processes_run_the_agents_of_one(file, tmp_path):
    """Each runs the agents of its own rows; rewards are those of one process."""
    rewards = []
    for count in (1, 2):
        run_dir = tmp_path / str(count)
        devices = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // count}"}
        flags = ["--agent", f"{file}:branching", "--steps=2", "--run-dir", str(run_dir)]
        ended = several.run(count, [*RUN, *flags], **devices)
        assert [process.code for process in ended] == [0] * count, ended[0].err
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        rewards.append([line["reward/mean"] for line in lines if "reward/mean" in line])
    assert rewards[0] == rewards[1]
    assert len(rewards[0]) == 2


@pytest.mark.nightly
def test_a_run_that_is_killed_in_mid_episode_goes_on_to_the_same_digest(file, tmp_path):
    flags = ["--agent", f"{file}:branching", "--steps=4", "--checkpoint.interval=1"]

    def start(run_dir: Path) -> subprocess.Popen:
        return several.start(1, [*RUN, *flags, "--run-dir", str(run_dir)])[0]

    def digest(run_dir: Path) -> str:
        return json.loads((run_dir / "summary.json").read_text())["params_digest"]

    began = time.monotonic()
    assert several.wait([start(tmp_path / "whole")])[0].code == 0
    seconds = time.monotonic() - began
    for number, share in enumerate((0.6, 0.75, 0.9)):
        run_dir = tmp_path / str(number)
        process = start(run_dir)
        time.sleep(share * seconds)
        process.kill()
        process.communicate()
        assert several.wait([start(run_dir)])[0].code == 0
        assert digest(run_dir) == digest(tmp_path / "whole")
