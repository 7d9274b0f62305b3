"""Conversations through the engine: sampler, environments, rewards and the trainer's log-probs."""

import json
import random
import string
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures import several
from tests.fixtures.sampling import decoder
from tpu_rl import models
from tpu_rl.commands import compose, config
from tpu_rl.environments.pool import EnvironmentLimits, EnvironmentPool
from tpu_rl.experience.config import BatchConfig
from tpu_rl.experience.layout import pack_experience
from tpu_rl.losses.log_probs import token_log_probs
from tpu_rl.rollout import records, requests, scoring
from tpu_rl.rollout.conversations import batches, episode_log
from tpu_rl.rollout.engine import Decoding, RolloutRequest, Scorer, make_engine
from tpu_rl.rollout.weights import RolloutPolicy
from tpu_rl.runtime import typed_json
from tpu_rl.sampler import ConversationSampler, SamplerConfig
from tpu_rl.tokenizers import characters
from tpu_rl.train import packing, sharding
from tpu_rl.types import Purpose, Rollout

GAMES = """
import time

class AtOnce:
    def reset(self, **row):
        pass
    def step(self, text):
        return "", 1.0, True, {}

class Long:
    '''Rewards 1, 2, 3, ... for turns; the answers differ in length. The last one raises.'''
    def reset(self, answer, **row):
        self.turn = 0
        self.fails = answer == "3"
    def step(self, text):
        self.turn += 1
        if self.fails and self.turn == 2:
            raise ValueError("out of order")
        return "=;" * self.turn, float(self.turn), self.turn == 4, {}
    def get_reward(self):
        return 10.0

class Uneven(Long):
    '''Four turns, three, and one.'''
    def reset(self, answer, **row):
        super().reset("", **row)
        self.left = {"1": 4, "3": 3}.get(answer, 1)
    def step(self, text):
        observation, reward, _, info = super().step(text)
        return observation, reward, self.turn == self.left, info
    def __getstate__(self):
        return [self.turn, self.left]
    def __setstate__(self, state):
        self.turn, self.left = state
        self.fails = False

class Slow(Long):
    def step(self, text):
        time.sleep(0.05 * (hash(text) % 3))
        return super().step(text)

class SlowUneven(Slow, Uneven):
    def reset(self, answer, **row):
        super().reset(answer, **row)
        self.left = 1 + int(answer) % 4
"""
ROWS = [{"prompt": f"{n}+{n + 2}-1=", "answer": str(2 * n + 1)} for n in range(4)]


@pytest.fixture(scope="module")
def games(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("games") / "games.py"
    file.write_text(GAMES)
    return file


def context_of(games: Path, name: str, *flags: str):
    """Return a run with a game, and its params."""
    run_dir = games.parent / "run"
    run_config = config.parse(
        [
            "arithmetic_grpo",
            "--batch.group-size=2",
            "--sampling.max-new-tokens=96",
            "--reward",
            *(["--environment", f"{games}:{name}"] if name else []),
            *flags,
            "--run-dir",
            str(run_dir),
        ]
    )
    return compose.make_context(run_config, run_dir, compose.make_mesh(run_config.mesh))


def roll_out(games: Path, name: str, *flags: str):
    context, params = context_of(games, name, *flags)
    with jax.set_mesh(context.mesh):
        scored = compose.rollout_engine(context).roll_out(params, RolloutRequest(ROWS, step=1))
    return context, params, scored


@pytest.mark.slow
def test_an_environment_that_ends_at_once_has_the_bits_of_a_single_turn(games):
    _, _, alone = roll_out(games, "")
    _, _, scored = roll_out(games, "AtOnce")
    assert scored.rewards.tolist() == [1.0] * 8
    rewarded = replace(scored.rollout, rewards=alone.rollout.rewards)
    jax.tree.map(np.testing.assert_array_equal, rewarded, alone.rollout)
    assert scored.rollout.parent is None


@pytest.mark.slow
def test_log_probs_over_turns_are_the_trainers(games):
    """The gap between sampler and trainer over four turns is at most 2e-5."""
    context, params, scored = roll_out(games, "Long")
    rollout = scored.rollout
    assert scored.episodes.counts["turns"].tolist() == [4, 4, 2, 2, 4, 4, 4, 4]
    mask = rollout.action_mask
    one_per_row = packing.one_per_row(jnp.asarray(rollout.tokens), jnp.asarray(mask), 8)
    rows = jax.tree.map(lambda leaf: leaf[0, 0], one_per_row)
    exact = token_log_probs(context.role("policy"), params, rows).log_probs
    gaps = np.abs(np.asarray(exact) - rollout.log_probs)[mask]
    assert gaps.max() <= 2e-5
    assert not rollout.log_probs[~mask].any()
    # Observations stand between turns, and nothing is behind the last action.
    inside = (np.cumsum(mask, 1) > 0) & (np.cumsum(mask[:, ::-1], 1)[:, ::-1] > 0)
    assert (inside & ~mask).sum(1).tolist() == scored.episodes.counts["observation_tokens"].tolist()
    texts = [
        context.language.tokenizer.decode(tokens[row_inside & ~row_mask].tolist())
        for tokens, row_inside, row_mask in zip(rollout.tokens, inside, mask, strict=True)
    ]
    assert texts[0] == "=;" * 6
    assert texts[2] == "=;"


@pytest.mark.slow
def test_rewards_of_turns_are_on_their_last_actions(games):
    _, _, scored = roll_out(games, "Long")
    rewards = scored.rollout.rewards
    for row in (0, 1, 4, 5, 6, 7):
        assert rewards[row][rewards[row] != 0].tolist() == [1.0, 2.0, 3.0, 14.0]
        mask = scored.rollout.action_mask[row]
        ends = np.flatnonzero(mask & ~np.append(mask[1:], False))
        assert np.flatnonzero(rewards[row]).tolist() == ends.tolist()
    assert scored.rewards[0] == 20.0
    # An episode that failed has a reason and no reward.
    assert not scored.rollout.scored[2:4].any()
    assert np.isnan(scored.rewards[2:4]).all()
    assert "out of order" in scored.faults[2]
    metrics = records.metrics(scored)
    assert metrics["env/turns"] == 3.5
    assert metrics["reward/errors"] == 2
    record = records.records(scored, step=1)[0]
    roles = [message["role"] for message in record["messages"]]
    assert roles[:3] == ["assistant", "user", "assistant"]
    assert record["episode"]["turns"] == 4
    kinds = [kind for kind, _ in record["seconds"]]
    assert kinds == ["reset", *["policy", "step"] * 4, "reward"]
    assert set(kinds) <= scored.episodes.seconds.keys()
    assert all(value >= 0 for _, value in record["seconds"])


def test_reward_functions_add_to_the_environments(games):
    _, _, scored = roll_out(games, "Long", "--reward", "0.5*arithmetic")
    expected = 0.5 * scored.parts["arithmetic"] + scored.parts["Long"]
    np.testing.assert_array_equal(scored.rewards, np.where(scored.rollout.scored, expected, np.nan))


def test_a_function_that_scores_nothing_leaves_it_to_the_environment(games):
    file = games.parent / "silent.py"
    file.write_text("def silent(completions, **columns):\n    return [None] * len(completions)\n")
    _, _, scored = roll_out(games, "Long", "--reward", f"{file}:silent")
    np.testing.assert_array_equal(scored.rewards, scored.parts["Long"])
    assert scored.rewards[0] == 20.0


def test_functions_in_other_processes_see_the_messages_while_others_are_decoded(games):
    file = games.parent / "rewards.py"
    file.write_text("""
def last_role(completions, completion_ids, **columns):
    assert all(len(ids) > 0 for ids in completion_ids)
    return [float([m["role"] for m in messages].count("user")) for messages in completions]
""")
    context, params = context_of(games, "Long", "--reward", f"{file}:last_role")
    engine = compose.rollout_engine(context)
    with jax.set_mesh(context.mesh):
        sampled = engine.generate(params, RolloutRequest(ROWS, step=1))
    # They may wait in a checkpoint. Rewards are then asked for again, by the same thread.
    restored = engine.resume(stored(sampled))
    for waiting in (sampled, restored):
        streamed = waiting.streamed_rewards()
        assert list(streamed) == ["rewards.last_role"]
        scored = engine.score(waiting)
        assert scored.parts["rewards.last_role"].tolist() == [4, 4, 1, 1, 4, 4, 4, 4]
        assert scored.episodes.states == sampled.episodes.states
        assert records.metrics(scored)["env/turns"] == 3.5


def stored(sampled: scoring.Sampled) -> scoring.Sampled:
    """Return completions as a checkpoint brings them back."""
    values = json.loads(json.dumps([typed_json.to_json(sampled)]))
    [restored] = typed_json.of_checkpoint(
        values, scoring.Sampled, Rollout, scoring.EpisodeOutcomes, scoring.EpisodeRows
    )
    return restored


def test_reward_functions_see_messages_and_the_environments(games):
    file = games.with_name("judge.py")
    file.write_text(
        "def judge(completions, environments, **columns):\n"
        "    return [env.turn + 0.01 * len(messages)\n"
        "            for env, messages in zip(environments, completions)]\n"
    )
    _, _, scored = roll_out(games, "Long", "--reward", f"{file}:judge")
    expected = [4.08 if not fault else 2.03 for fault in scored.faults]
    (judged,) = (values for name, values in scored.parts.items() if "judge" in name)
    np.testing.assert_allclose(judged, expected, rtol=1e-6)


@pytest.mark.slow
def test_an_episode_without_room_for_another_turn_ends_and_is_judged(games):
    _, _, scored = roll_out(games, "Long", "--sampling.max-new-tokens", "12")
    judged = [0, 1, 4, 5, 6, 7]
    cut = scored.episodes.counts["turns"][judged] < 4
    assert cut.any()
    assert scored.rollout.truncated[judged][cut].all()
    assert scored.rollout.scored[judged].all()


@pytest.mark.slow
def test_slow_answers_and_few_slots_change_no_bit(games):
    _, _, scored = roll_out(games, "Long", "--sampling.max-num-seqs", "4")
    _, _, slow = roll_out(games, "Slow", "--sampling.max-num-seqs", "4")
    jax.tree.map(np.testing.assert_array_equal, slow.rollout, scored.rollout)


def test_evaluations_repeat_themselves(games):
    context, params = context_of(games, "Long")
    decoding = compose.decoding(context, purpose=Purpose.EVALUATION, seed=0)
    engine = make_engine(decoding, compose.scorer(context))
    with jax.set_mesh(context.mesh):
        first = engine.roll_out(params, RolloutRequest(ROWS, step=0))
        second = engine.roll_out(params, RolloutRequest(ROWS, step=0))
    jax.tree.map(np.testing.assert_array_equal, first.rollout, second.rollout)


def test_an_evaluation_runs_the_programs_of_rollouts(games, monkeypatch):
    """Fewer problems than a step has completions are decoded in its slots, and tell the same."""
    made = []
    monkeypatch.setattr(
        batches,
        "ConversationSampler",
        lambda *a, **k: made.append(k) or ConversationSampler(*a, **k),
    )
    context, params = context_of(games, "AtOnce")
    decoding = compose.decoding(context, purpose=Purpose.EVALUATION, seed=0)
    rollouts = []
    for shapes_of in (None, (4, 2), (1, 2)):
        settings = replace(decoding.config, samples_per_prompt=1, shapes_of=shapes_of)
        own = make_engine(replace(decoding, config=settings), compose.scorer(context))
        with jax.set_mesh(context.mesh):
            rollouts.append(own.roll_out(params, RolloutRequest(ROWS[:3], step=0)).rollout)
    assert [(k["num_slots"], k["contexts_at_once"]) for k in made] == [(3, 3), (8, 4), (3, 3)]
    np.testing.assert_array_equal(rollouts[0].tokens, rollouts[1].tokens)


@pytest.mark.slow
def test_episodes_go_on_in_another_request(games):
    """The same after a kill; with the old policy they end as if nothing had stopped them."""
    context, params = context_of(games, "Uneven")
    engine = compose.rollout_engine(context)
    with jax.set_mesh(context.mesh):
        whole = engine.generate(params, RolloutRequest(ROWS, step=1))
        first = engine.generate(params, RolloutRequest(ROWS, 1, first_groups=2, policy_step=5))
        unfinished = [replace(g, logs=[log.copy() for log in g.logs]) for g in first.unfinished]
        held = json.loads(json.dumps(typed_json.to_json(unfinished)))
        restored = typed_json.of_checkpoint(held, scoring.PartialGroup, *episode_log.CLASSES)
        later = []
        for groups in (first.unfinished, restored):
            logs = [log for group in groups for log in group.logs]
            rows = [group.row for group in groups]
            request = RolloutRequest(rows, 2, policy_step=6, logs=logs, first_groups=2)
            later.append(engine.generate(params, request))
    # Of the rows 0 to 3, the last two have one turn, and the others four and three.
    assert [row["answer"] for row in first.rows] == ["5", "7"]
    assert [row["answer"] for row in later[0].rows] == ["1", "3"]
    assert first.episodes.counts["turns"].tolist() == [1, 1, 1, 1]
    assert later[0].episodes.counts["turns"].tolist() == [4, 4, 3, 3]
    for sampled, groups in ((first, slice(4, 8)), (later[0], slice(0, 4)), (later[1], slice(0, 4))):
        for name in ("tokens", "action_mask", "birth_key"):
            expected = getattr(whole.rollout, name)[groups]
            np.testing.assert_array_equal(getattr(sampled.rollout, name), expected)
        # Each is at most 2e-5 from the trainer's log-prob, see above, so that both differ by twice
        # as much at most.
        np.testing.assert_allclose(
            sampled.rollout.log_probs, whole.rollout.log_probs[groups], atol=4e-5
        )
        assert sampled.episodes.messages == whole.episodes.messages[groups]
        assert sampled.completions == whole.completions[groups]
    jax.tree.map(np.testing.assert_array_equal, later[1].rollout, later[0].rollout)
    assert first.rollout.policy_step.tolist() == later[0].rollout.policy_step.tolist() == [5] * 4
    # That an answer ends an episode is known in the round after its turn.
    turns_of = [log.turns for group in first.unfinished for log in group.logs]
    steps_of = [[logged.policy_step for logged in turns] for turns in turns_of]
    assert steps_of == [[5, 5, 6, 6]] * 2 + [[5, 5, 6]] * 2
    num_tokens = sum(len(logged.turn.tokens) for turns in turns_of for logged in turns[:2])
    assert later[0].num_resumed_tokens == num_tokens
    assert first.num_resumed_tokens == 0
    assert not later[0].unfinished


RUN = ["launch/run.py", "arithmetic_grpo", "--batch.prompts=4", "--batch.group-size=2", "--steps=2"]


@pytest.mark.nightly
def test_two_processes_hold_the_conversations_of_one(games, tmp_path):
    """Each runs the environments of its own rows; metrics and weights are those of one process."""
    command = [
        *RUN,
        "--environment",
        f"{games}:Long",
        "--sampling.max-new-tokens=96",
        "--evaluation.rows=0",
    ]
    digests = []
    for count in (1, 2):
        run_dir = tmp_path / str(count)
        devices = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // count}"}
        ended = several.run(count, [*command, "--run-dir", str(run_dir)], **devices)
        assert [process.code for process in ended] == [0] * count, ended[0].err
        digests.append((run_dir / "metrics.jsonl").read_text())
    rewards = [
        [row["reward/mean"] for row in map(json.loads, text.splitlines()) if "reward/mean" in row]
        for text in digests
    ]
    assert rewards[0] == rewards[1]
    assert len(rewards[0]) == 2


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "flags"), [("Slow", []), ("SlowUneven", ["--rollout.partial=2"])])
def test_a_run_that_is_killed_in_mid_episode_goes_on_to_the_same_digest(
    games, tmp_path, name, flags
):
    """Ten times, at random moments."""
    command = [
        *RUN[:-1],
        "--steps=6",
        "--checkpoint.interval=1",
        "--environment",
        f"{games}:{name}",
        *flags,
        "--sampling.max-new-tokens=96",
        "--evaluation.rows=0",
    ]

    def start(run_dir: Path) -> subprocess.Popen:
        return several.start(1, [*command, "--run-dir", str(run_dir)])[0]

    def digest(run_dir: Path) -> str:
        return json.loads((run_dir / "summary.json").read_text())["params_digest"]

    began = time.monotonic()
    whole = tmp_path / "whole"
    assert several.wait([start(whole)])[0].code == 0
    seconds = time.monotonic() - began
    moments = random.Random(0)
    for number in range(10):
        run_dir = tmp_path / str(number)
        process = start(run_dir)
        time.sleep(moments.uniform(0.4, 0.95) * seconds)
        process.kill()
        process.communicate()
        assert several.wait([start(run_dir)])[0].code == 0
        assert digest(run_dir) == digest(whole)


# --- rewritten histories ---

SHORTENING = (
    "{% for m in messages %}<bos>{{ m.role }}\n"
    "{{ m.content[:3] if m.role == 'assistant' and not loop.last else m.content }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
"""A template that drops most of what the assistant said as soon as another message follows."""


class Echo:
    """A game of three turns, with a reward for each."""

    def reset(self, **row):
        self.turn = 0

    def step(self, text):
        self.turn += 1
        return f"turn {self.turn}", float(self.turn), self.turn == 3, {}


@pytest.mark.nightly
def test_a_rewritten_history_is_a_row_of_its_own():
    """Its log-probs are the trainer's in packed rows that share what is common."""
    tokenizer = characters(string.printable, SHORTENING)
    model, params = decoder(vocab_size=tokenizer.vocab_size, max_position_embeddings=512)
    settings = SamplerConfig(
        max_new_tokens=160,
        stop_ids=tokenizer.eos_ids,
        logit_bias=((tokenizer.eos_ids[0], 3.0),),  # Turns are short.
        samples_per_prompt=2,
        prompt_length=32,
    )
    pool = EnvironmentPool(Echo, EnvironmentLimits(isolate=False))
    policy = RolloutPolicy(models.policy(model), lambda tree: tree, sharding.make_mesh())
    environment = requests.Environment(pool, 5, 60)
    decoding = Decoding(policy, settings, 32, environment=environment)
    engine = make_engine(decoding, Scorer(tokenizer))
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("go", "run")]
    with jax.set_mesh(policy.mesh):
        sampled = engine.generate(params, RolloutRequest(rows, step=1))
    scored = engine.score(sampled)
    rollout = scored.rollout
    restored = engine.score(engine.resume(stored(sampled)))
    jax.tree.map(np.testing.assert_array_equal, restored.rollout, rollout)
    assert records.records(restored, 1) == records.records(scored, 1)
    assert rollout.episode_id is not None
    counts = np.bincount(rollout.episode_id)
    assert len(counts) == 4
    assert counts.max() == 3
    by_episode = scoring.by_episode(scored)
    turns = scored.episodes.counts["turns"]
    for row, parent in enumerate(rollout.parent):
        shared = rollout.shared[row]
        assert parent <= row
        np.testing.assert_array_equal(rollout.tokens[row, :shared], rollout.tokens[parent, :shared])
        assert not rollout.action_mask[row, :shared].any() or parent == row
    last = np.append(np.diff(rollout.episode_id) > 0, True)
    totals = {1: 0.0, 2: 1.0, 3: 6.0}
    np.testing.assert_allclose(by_episode.rewards, [totals[int(t)] for t in turns[last]])

    batch = BatchConfig(prompts=2, group_size=2, row_length=512, micro_batch_rows=2)
    role = models.role(model, lambda tree: tree)
    with jax.set_mesh(policy.mesh):
        experience = pack_experience(batch, rollout, policy.mesh)
        packed = packing.over_micro_batches(
            lambda rows: token_log_probs(role, params, rows).log_probs,
            experience.layout.rows(experience.data.tokens),
        )
        exact = np.asarray(experience.layout.unpack(packed))
    mask = rollout.action_mask
    np.testing.assert_allclose(rollout.log_probs[mask], exact[mask], atol=2e-5)
