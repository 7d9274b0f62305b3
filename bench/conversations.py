"""Conversations of several turns in the sampler, against the same tokens in one turn.

    python bench/conversations.py [--arms "one turn" "several turns"] [--repeats 5]

Arms, one after the other in each repeat; the median of each is printed in seconds:

    one turn         `sampler.sample`: as many sampled tokens per row, in a single turn
    several turns    `ConversationSampler`: after each turn an observation, read into its cache
    prefill again    the same, but each turn is a new conversation, whose context is read anew
    slow tool        as several turns; each observation arrives 200 ms after its turn has ended
    few slots        as slow tool, with slots for half of the episodes

The model is random. No turn ends before its limit, so that these arms sample the same number of
tokens. Three more arms run the whole engine, with a game in worker processes. Their turns end with
a stop token, after about 40 tokens:

    game             `engine.generate`: four turns of a game that answers at once
    game as one turn `sampler.sample`: each row samples as many tokens as its episode had
    slow game        as game; each answer takes 200 ms
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import string
import time
from dataclasses import replace

import jax
import numpy as np

from tpu_rl import models
from tpu_rl.environments.pool import EnvironmentLimits, EnvironmentPool
from tpu_rl.rollout.engine import Decoding, RolloutRequest, Scorer, make_engine
from tpu_rl.rollout.requests import Environment
from tpu_rl.rollout.weights import RolloutPolicy
from tpu_rl.sampler import (
    ConversationSampler,
    SamplerConfig,
    SegmentConfig,
    TurnRequest,
    row_keys,
    run_key,
    sample,
)
from tpu_rl.tokenizers import characters
from tpu_rl.train import sharding
from tpu_rl.types import Purpose

MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
}
TOKENIZER = characters(string.printable)
PROMPT_TOKENS = 64
GROUP_SIZE = 8
TOOL_SECONDS = 0.2


class Game:
    """Four turns."""

    seconds = 0.0

    def reset(self, **row):
        self.turn = 0

    def step(self, text):
        time.sleep(self.seconds)
        self.turn += 1
        return "an observation. ", 1.0, self.turn == 4, {}


class SlowGame(Game):
    """The same, with slow answers."""

    seconds = TOOL_SECONDS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-tokens", type=int, default=64)
    parser.add_argument("--observation-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arms", nargs="+", help="by default all")
    flags = parser.parse_args()
    model = models.from_config(MODEL)
    policy = models.policy(model)
    params = jax.jit(model.init)(jax.random.key(0))
    generator = np.random.default_rng(0)
    shape = (flags.episodes // GROUP_SIZE, PROMPT_TOKENS)
    prompts = generator.integers(10, 4000, shape).tolist()
    observations = generator.integers(10, 4000, (flags.turns, flags.observation_tokens)).tolist()
    key = run_key(0, Purpose.ROLLOUT, 0)
    keys = np.asarray(jax.random.key_data(row_keys(key, np.arange(flags.episodes))))
    total = flags.turns * flags.turn_tokens
    max_length = PROMPT_TOKENS + total + flags.turns * flags.observation_tokens

    def one_turn() -> None:
        config = SamplerConfig(
            max_new_tokens=total, samples_per_prompt=GROUP_SIZE, prompt_length=PROMPT_TOKENS
        )
        sample(policy, params, prompts, key, config)

    def turns(again: bool = False, seconds: float = 0.0, slots: int = flags.episodes) -> None:
        live = ConversationSampler(
            policy,
            params,
            SamplerConfig(max_new_tokens=flags.turn_tokens, segments=SegmentConfig(steps=16)),
            num_slots=slots,
            max_length=max_length,
            prompt_length=PROMPT_TOKENS,
            contexts_at_once=len(prompts),
        )
        texts = [list(prompts[row // GROUP_SIZE]) for row in range(flags.episodes)]
        num_turns = [0] * flags.episodes
        arriving: list[tuple[float, int]] = []
        live.submit([request(row, row) for row in range(flags.episodes)])
        while arriving or not live.is_idle:
            if live.is_idle:
                time.sleep(max(arriving[0][0] - time.perf_counter(), 0))
            requests = []
            while arriving and arriving[0][0] <= time.perf_counter():
                _, row = heapq.heappop(arriving)
                texts[row] += observations[num_turns[row]]
                number = row + (flags.episodes * num_turns[row] if again else 0)
                requests.append(TurnRequest(number, list(texts[row]), keys[row], flags.turn_tokens))
            live.submit(requests)
            for turn in live.step():
                row = turn.conversation % flags.episodes
                texts[row] += turn.tokens
                num_turns[row] += 1
                if again or num_turns[row] == flags.turns:
                    live.close(turn.conversation)
                if num_turns[row] < flags.turns:
                    heapq.heappush(arriving, (time.perf_counter() + seconds, row))

    def request(number: int, row: int) -> TurnRequest:
        return TurnRequest(number, prompts[row // GROUP_SIZE], keys[row], flags.turn_tokens)

    mesh = sharding.make_mesh()
    rollout_policy = RolloutPolicy(policy, lambda tree: tree, mesh)
    game_config = SamplerConfig(
        max_new_tokens=2 * total,
        stop_ids=TOKENIZER.eos_ids,
        # All other tokens than characters and the stop token are forbidden.
        logit_bias=(
            (TOKENIZER.eos_ids[0], 1.0),
            *((token, float("-inf")) for token in range(TOKENIZER.vocab_size, 4096)),
        ),
        samples_per_prompt=GROUP_SIZE,
        prompt_length=PROMPT_TOKENS,
    )
    rows = [{"prompt": f"{index} " * (PROMPT_TOKENS // 2)} for index in range(len(prompts))]
    game_prompts = [TOKENIZER.encode_prompt(row["prompt"]) for row in rows]
    lengths = np.zeros(flags.episodes, int)

    def engine_of(game: str):
        pool = EnvironmentPool(f"{__file__}:{game}", EnvironmentLimits())
        environment = Environment(pool, flags.turns, 32)
        decoding = Decoding(rollout_policy, game_config, PROMPT_TOKENS, environment=environment)
        return make_engine(decoding, Scorer(TOKENIZER))

    engines = {name: engine_of(name) for name in ("Game", "SlowGame")}

    def play(game: str) -> None:
        sampled = engines[game].generate(params, RolloutRequest(rows, step=1))
        lengths[:] = sampled.lengths

    def game_as_one_turn() -> None:
        config = replace(game_config, stop_ids=())
        sample(policy, params, game_prompts, key, config, limits=lengths, mesh=mesh)

    arms = {
        "one turn": one_turn,
        "several turns": turns,
        "prefill again": lambda: turns(again=True),
        "slow tool": lambda: turns(seconds=TOOL_SECONDS),
        "few slots": lambda: turns(seconds=TOOL_SECONDS, slots=flags.episodes // 2),
        "game": lambda: play("Game"),
        "game as one turn": game_as_one_turn,
        "slow game": lambda: play("SlowGame"),
    }
    arms = {name: run for name, run in arms.items() if name in (flags.arms or arms)}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(flags.repeats + 1):
        for name, run in arms.items():
            began = time.perf_counter()
            with jax.set_mesh(mesh):
                run()
            if repeat:  # The first one compiles.
                seconds[name].append(time.perf_counter() - began)
                print(f"{name}: {seconds[name][-1]:.2f} s", flush=True)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        spread = f"{min(seconds[name]):.2f} to {max(seconds[name]):.2f}"
        print(f"{name:17} {median:6.2f} s ({spread})")
    for name, other in (
        ("several turns", "one turn"),
        ("prefill again", "several turns"),
        ("slow tool", "several turns"),
        ("game", "game as one turn"),
        ("slow game", "game"),
    ):
        if name in medians and other in medians:
            print(f"{name} / {other}: {medians[name] / medians[other]:.2f}")


if __name__ == "__main__":
    main()
