"""Train on programs that call the policy over HTTP: `--agent FILE.py:FUNCTION`.

    async def run(row, base_url, api_key) -> float | None

This process runs an OpenAI-compatible server. Each completion of a data row is one call of the
function, in a worker process, with many calls at once. Each call gets its own API key; the server
records its requests under that key, as one episode. A number that the function returns is the
reward; None leaves the judgment to --reward.

    generate    the function runs, and the policy writes the completions that it requests
    score       rewards as of any completion; an episode of several rows has one

An exception, or an end that does not come in time, is a fault of that episode alone. Such an
episode is not scored and teaches nothing. If its conversation was full, the exception is no fault:
the episode is truncated, and its reward is 0 unless --reward judges it.
"""

from __future__ import annotations

import functools
import itertools
import secrets
import time
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_rl import sampler, user_code
from tpu_rl.data import Row
from tpu_rl.environments.pool import EnvironmentLimits, EnvironmentPool, Reply
from tpu_rl.errors import InputError
from tpu_rl.rollout import prompts, scoring, signals
from tpu_rl.rollout.branches import Branch, episode_rows, last_rows, to_rollout
from tpu_rl.rollout.conversations.episodes import without_images
from tpu_rl.rollout.engine import Decoding, Engine, RolloutRequest, Scorer
from tpu_rl.rollout.image_prompts import ImageTable
from tpu_rl.rollout.requests import Agent
from tpu_rl.rollout.scoring import EpisodeOutcomes, Sampled
from tpu_rl.rollout.streaming_rewards import StreamingRewards
from tpu_rl.runtime import processes
from tpu_rl.sampler import ConversationSampler, TurnRequest
from tpu_rl.serving import agent_environment
from tpu_rl.serving.app import App, EpisodeAccount, Limits
from tpu_rl.serving.pump import Distribution, Item, PendingTurn, Pump
from tpu_rl.serving.server import LOOPBACK, Server, bind, require_packages
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.tokenizers.images import sources_of
from tpu_rl.types import Params, Purpose

CONTEXTS_AT_ONCE = 4
"""New prompts of a device that are read together. Calls of many episodes rarely come at once."""
POLL_SECONDS = 0.05
NAME = "agent"
"""The name of its reward and its faults."""

_pool_ids = itertools.count()


def make_agent(path: str, limits: EnvironmentLimits, seconds: float, max_calls: int) -> Agent:
    """Return the agent of a file, which is loaded.

    Args:
        path: FILE.py:FUNCTION.
        limits: number and memory of workers.
        seconds: time for an episode.
        max_calls: calls of the server in an episode.

    Raises:
        InputError: if there is no such file, it does not load, or it has no such function.
        MachineError: if the server's package is not installed.
    """
    require_packages()
    file_name = path.rpartition(":")[0]
    user_code.require_file(Path(file_name).expanduser().absolute(), "agent", file_name or path)
    limits = replace(limits, call_seconds=seconds)
    pool = EnvironmentPool(
        f"{agent_environment.__file__}:{agent_environment.Agent.__name__}", limits
    )
    probe = next(_pool_ids)
    reply = pool.reset(probe, {"agent": path, "row": {}, "base_url": "", "api_key": ""}).result()
    pool.release(probe)
    if reply.fault:
        # The message of an InputError has lines of its own.
        raise InputError(
            "the agent does not load", where=f"--agent {path}", why=reply.fault, fix="repair it"
        )
    return Agent(path, pool, max_calls)


def make_agent_engine(agent: Agent, decoding: Decoding, scorer: Scorer) -> Engine:
    """Return the engine whose completions are the episodes of an agent."""
    engine = _AgentEngine(agent, decoding, scorer)
    return Engine(engine.generate, scorer)


class Outcome(NamedTuple):
    """What became of an episode. JSON can write it."""

    branches: list[Branch]
    reward: float | None
    fault: str
    messages: list[dict[str, Any]]
    """The last conversation, from the first message of the policy on."""
    calls: int
    is_truncated: bool
    """It failed after its conversation had filled the room for tokens."""
    waits: list[tuple[str, float]]
    """As in `EpisodeOutcomes`."""


class _Service(NamedTuple):
    """A server for the requests of a batch's episodes."""

    app: App
    server: Server
    accounts: dict[str, EpisodeAccount]
    """API key -> episode."""


class _AgentEngine:
    def __init__(self, agent: Agent, decoding: Decoding, scorer: Scorer):
        self._agent = agent
        self._decoding = decoding
        self._scorer = scorer
        self._idle: list[_Service] = []
        """Services that no batch uses. Several batches may be sampled at once."""
        self._numbers = itertools.count(processes.index(), processes.count())
        config = decoding.config
        self._distribution = Distribution(
            config.temperature, config.top_k, config.top_p, config.min_p
        )
        self._limits = Limits(
            decoding.max_prompt_tokens + config.max_new_tokens, config.max_new_tokens
        )

    # --- generate ---

    def generate(self, params: Params, request: RolloutRequest) -> Sampled:
        """Run the agent once for each completion that the request asks for.

        All processes call it together. Each runs the agents of its own groups.
        """
        began = time.perf_counter()
        if request.resumed is not None or request.first_groups is not None:
            raise InputError(
                "episodes of agents cannot be left unfinished",
                where="--rollout.partial, --agent",
                why="the state of an agent is not part of checkpoints",
                fix="use --batch.staleness with --sampling.during-updates",
            )
        decoding = self._decoding
        group_size = decoding.config.samples_per_prompt
        num_episodes = len(request.rows) * group_size
        row_ids = request.first_row_id + np.arange(num_episodes)
        run_key = sampler.run_key(decoding.seed, decoding.purpose, request.step)
        keys = np.asarray(jax.random.key_data(sampler.row_keys(run_key, row_ids)))
        signals.mark(decoding.purpose, "rollout", request.step)
        local = scoring.local_rows(num_episodes, group_size)
        features = decoding.policy.with_images
        images = features and ImageTable(self._scorer.tokenizer, features)
        rewarding = self._scorer.streaming(request.rows, group_size, step=request.step)
        with rewarding as streaming, decoding.on_its_mesh():
            outcomes, idle_seconds = self._run(
                params, request.rows, keys, group_size, local, streaming, images
            )
        signals.mark(decoding.purpose, "rewards", request.step)
        ordered = [outcomes[episode] for episode in range(num_episodes)]
        sampled = self._sampled(request, ordered, idle_seconds, keys, group_size, images)
        return replace(
            sampled,
            step=request.step,
            seconds=time.perf_counter() - began,
            streamed_rewards=streaming.answers,
            cancel_rewards=streaming.cancel,
        )

    def _run(
        self,
        params: Params,
        rows: list[Row],
        keys: np.ndarray,
        group_size: int,
        local: slice,
        streaming: StreamingRewards,
        images: ImageTable | None,
    ) -> tuple[dict[int, Outcome], float]:
        """Run all local episodes, and return the outcomes of all processes' episodes, and the
        seconds in which nothing was decoded.

        Reward functions judge a group once its episodes are over.
        """
        running: _Running | None = None
        try:
            service = self._idle.pop()
        except IndexError:  # Threads may take one at the same moment.
            service = self._new_service()
        app, server, accounts = service
        app.images = images
        app.pump = pump = Pump(functools.partial(self._sampler, images, params, len(keys)), _share)
        try:
            running = _Running(self._agent, server.url, pump.wake)
            first_prompts = [self._first_prompt(row, images) for row in rows]
            for episode in range(local.start, local.stop):
                account = EpisodeAccount(
                    self._scorer.tokenizer,
                    self._numbers,
                    row_key=keys[episode],
                    first_prompt=first_prompts[episode // group_size],
                    most_calls=self._agent.max_calls,
                    is_strict=self._decoding.purpose is not Purpose.EVALUATION,
                )
                key = secrets.token_urlsafe(24)
                accounts[key] = account
                running.begin(episode, rows[episode // group_size], key)
            outcomes: dict[int, Outcome] = {}
            while processes.any_of(bool(running.keys)):
                pump.step(POLL_SECONDS)
                signals.between_segments()
                for episode, key, reply in running.ended():
                    account = accounts.pop(key)
                    account.is_over = True
                    for conversation in account.conversations.open:
                        pump.close(conversation)
                    outcome = self._outcome(account, reply)
                    outcomes[episode] = outcome
                    actions = [token for branch in outcome.branches for token in branch.actions]
                    streaming.on_answered({episode: outcome.messages}, {episode: actions})
        finally:
            accounts.clear()
            pump.end(InputError("the rollout has ended"))
            if running is not None:
                running.stop()
            self._idle.append(service)
        return _shared(outcomes), pump.idle_seconds

    def _outcome(self, account: EpisodeAccount, reply: Reply) -> Outcome:
        fault = reply.fault
        reward = reply.reward
        is_truncated = bool(fault and account.overlong and account.record.calls)
        if is_truncated:
            fault = ""
            reward = None if self._scorer.reward_functions else 0.0
        if fault and account.overlong:
            fault = (
                f"its first prompt has {account.overlong} tokens, and a conversation at most "
                f"{self._limits.max_model_len} (--sampling.max-prompt-tokens and "
                f"--sampling.max-new-tokens together); {fault}"
            )
        if not fault and not account.record.calls:
            fault = "it asked the policy for nothing"
        if not fault and reward is None and not self._scorer.reward_functions:
            fault = "it returned no reward, and no --reward judges what it did"
        branches = account.record.branches()
        messages = account.history.last_messages()
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        messages = [without_images(message) for message in messages[places[0] :]] if places else []
        if not messages:
            token_ids = branches[-1].actions if branches else []
            content = self._scorer.tokenizer.decode(token_ids)
            messages = [{"role": "assistant", "content": content}]
        calls = len(account.record.calls)
        account.has_waited_for("agent")
        return Outcome(branches, reward, fault, messages, calls, is_truncated, account.waits)

    def _first_prompt(self, row: Row, images: ImageTable | None) -> list[int] | None:
        """Return the ids of the row's prompt, if they can be told."""
        if "prompt" not in row:
            return None
        try:
            ids = self._scorer.tokenizer.encode_prompt(row["prompt"], row.get("tools"))
            return images.place(ids, sources_of(row)) if images else ids
        except InputError:
            return None

    def _sampler(
        self, images: ImageTable | None, params: Params, rows: int, distribution: Distribution
    ) -> ConversationSampler:
        del distribution  # That of the run, the only one that episodes may ask for.
        decoding = self._decoding
        config = decoding.config
        reader = self._scorer.tokenizer.images
        return ConversationSampler(
            decoding.policy.policy,
            decoding.policy.params(params),
            config,
            num_slots=min(config.max_num_seqs, config.rows_of_programs(rows)),
            max_length=self._limits.max_model_len,
            prompt_length=decoding.max_prompt_tokens,
            contexts_at_once=CONTEXTS_AT_ONCE,
            mesh=decoding.policy.mesh,
            stop_at=prompts.stop_at(self._scorer.tokenizer, decoding.stop_strings),
            on_segment=signals.between_segments,
            whole_images=reader and reader.whole_images,
            images=images,
        )

    def _new_service(self) -> _Service:
        """Return a service that answers, and lives as long as the process."""
        from tpu_rl.serving import routes  # The package starlette is there, as checked before.

        no_pump: Any = None
        # The server's thread lives on, and must not keep the engine with its weights.
        accounts: dict[str, EpisodeAccount] = {}
        app = App(
            no_pump,
            self._scorer.tokenizer,
            "policy",
            self._limits,
            self._distribution,
            lambda key: accounts.get(key or ""),
        )
        server = Server(routes.application(app), bind(LOOPBACK, 0))
        server.start()
        return _Service(app, server, accounts)

    # --- rows ---

    def _sampled(
        self,
        request: RolloutRequest,
        outcomes: list[Outcome],
        idle_seconds: float,
        keys: np.ndarray,
        group_size: int,
        images: ImageTable | None,
    ) -> Sampled:
        tokenizer = self._scorer.tokenizer
        all_branches = [outcome.branches or [_no_calls(tokenizer)] for outcome in outcomes]
        rollout = to_rollout(
            all_branches,
            keys,
            group_size,
            self._limits.max_model_len,
            self._decoding.config.pad_id,
            request.policy_step,
        )
        if images is not None:
            rollout = images.with_own_images(rollout)
        rows = episode_rows(rollout, all_branches, tokenizer)
        counts = np.array([len(branches) for branches in all_branches])
        last = last_rows(rows)
        rewards = np.array([np.nan if o.reward is None else o.reward for o in outcomes], np.float32)
        episodes = EpisodeOutcomes(
            names=[NAME] * len(outcomes),
            is_scored=bool(np.isfinite(rewards).any()),
            rewards=rewards,
            turn_rewards=np.zeros(last.tokens.shape, np.float32),
            faults=[outcome.fault for outcome in outcomes],
            messages=[outcome.messages for outcome in outcomes],
            states=[{} for _ in outcomes],
            idle_seconds=idle_seconds,
            waits=[outcome.waits for outcome in outcomes],
            counts={
                "turns": np.array([outcome.calls for outcome in outcomes]),
                "branches": counts,
                "errors": np.array([bool(outcome.fault) for outcome in outcomes], int),
                "truncated": np.array([outcome.is_truncated for outcome in outcomes], int),
                "observation_tokens": np.array(
                    [sum(branch.num_observed for branch in o.branches) for o in outcomes]
                ),
            },
        )
        return Sampled(
            rollout=last,
            rows=request.rows,
            prompts=[
                prompts.as_text(row.get("prompt", ""))
                for row in request.rows
                for _ in range(group_size)
            ],
            completions=[prompts.as_text(outcome.messages) for outcome in outcomes],
            lengths=np.add.reduceat(rollout.action_mask.sum(-1), rows.last + 1 - counts),
            episodes=episodes,
            episode_rows=rows,
        )


class _Running:
    """The episodes that run, in workers."""

    def __init__(self, agent: Agent, base_url: str, wake: Any):
        self._agent = agent
        self._base_url = base_url
        self._wake = wake
        self.keys: dict[int, str] = {}
        """Episode -> API key, of the episodes that are not over."""
        self._pool_ids: dict[int, int] = {}
        self._pending: dict[int, tuple[str, Future[Reply]]] = {}
        """Episode -> the call of the pool that runs, and its reply."""

    def begin(self, episode: int, row: Row, key: str) -> None:
        """Start an episode."""
        self.keys[episode] = key
        self._pool_ids[episode] = next(_pool_ids)
        arguments = {
            "agent": self._agent.path,
            "row": dict(row),
            "base_url": self._base_url,
            "api_key": key,
        }
        self._wait(episode, "reset", self._agent.pool.reset(self._pool_ids[episode], arguments))

    def _wait(self, episode: int, call: str, future: Future[Reply]) -> None:
        self._pending[episode] = (call, future)
        future.add_done_callback(lambda _: self._wake())

    def ended(self) -> list[tuple[int, str, Reply]]:
        """Return (episode, API key, reply) of the episodes that have ended."""
        ended = []
        for episode, (call, future) in sorted(self._pending.items()):
            if not future.done():
                continue
            reply = future.result()
            pool_id = self._pool_ids[episode]
            if call == "reset" and not reply.fault:
                self._wait(episode, "reward", self._agent.pool.reward(pool_id))
                continue
            del self._pending[episode]
            self._agent.pool.release(pool_id)
            ended.append((episode, self.keys.pop(episode), reply))
        return ended

    def stop(self) -> None:
        """Give up the episodes that still run."""
        for episode in self._pending:
            self._agent.pool.release(self._pool_ids[episode])


def _no_calls(tokenizer: Tokenizer) -> Branch:
    """Return the row of an episode without calls, which is not scored: an end of sequence."""
    end = tokenizer.eos_ids[0]
    return Branch(0, 0, [end, end], [False, True], [0.0, 0.0], [0.0, 0.0], True)


# --- several processes ---


def _share(items: list[Item]) -> list[list[Item]]:
    """Return the items of all processes, by index."""
    if processes.count() == 1:
        return [items]

    def plain(item: Item) -> Any:
        if isinstance(item, int):
            return item
        request = [*item.request[:2], item.request.key.tolist(), item.request.max_new_tokens]
        return [list(item.distribution), request, item.is_watched]

    def restored(value: Any) -> Item:
        if isinstance(value, int):
            return value
        distribution, (conversation, token_ids, key, max_new_tokens), is_watched = value
        key = np.array(key, np.uint32)
        request = TurnRequest(conversation, token_ids, key, max_new_tokens)
        return PendingTurn(Distribution(*distribution), request, is_watched)

    return [
        [restored(value) for value in values]
        for values in processes.gather([plain(item) for item in items])
    ]


def _shared(outcomes: dict[int, Outcome]) -> dict[int, Outcome]:
    """Return the outcomes of all processes' episodes."""
    if processes.count() == 1:
        return outcomes
    plain = [
        [episode, [asdict(branch) for branch in outcome.branches], list(outcome[1:])]
        for episode, outcome in outcomes.items()
    ]
    return {
        episode: Outcome([Branch(**branch) for branch in branches], *rest)
        for values in processes.gather(plain)
        for episode, branches, rest in values
    }
