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

**Episodes that go on** in the next step (`--rollout.partial`). A round of an episode is one call,
or several at the same time; `conversations.rounds` decides by these which episodes a step takes. A
call whose round the step may not have waits in the server, and the function in its worker, until
the next step answers. The log of the episode has its calls and turns. In another process the
function begins again, and calls of the log get their turns from there. If it asks for anything else
before it has made all of them, or ends, it cannot be replayed: the log is dropped, and the episode
begins anew, with its key, in the step that has to take it.
"""

from __future__ import annotations

import itertools
import secrets
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpu_rl import user_code
from tpu_rl.data import Row
from tpu_rl.environments.pool import EnvironmentLimits, EnvironmentPool, Reply
from tpu_rl.errors import InputError
from tpu_rl.rollout import signals
from tpu_rl.rollout.branches import Branch
from tpu_rl.rollout.conversations.batches import EpisodeBatch, FinishedEpisode
from tpu_rl.rollout.conversations.episode_log import EpisodeLog
from tpu_rl.rollout.conversations.episodes import without_images
from tpu_rl.rollout.conversations.rounds import Rounds
from tpu_rl.rollout.engine import Decoding, Engine, RolloutRequest, Scorer
from tpu_rl.rollout.image_prompts import ImageTable
from tpu_rl.rollout.requests import Agent
from tpu_rl.rollout.scoring import Sampled
from tpu_rl.runtime import processes, typed_json
from tpu_rl.sampler import TurnRequest
from tpu_rl.serving import agent_environment
from tpu_rl.serving.app import App, EpisodeAccount, Limits
from tpu_rl.serving.pump import Distribution, Item, PendingTurn, Pump
from tpu_rl.serving.record import branches_of
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


def refuse_images(tokenizer: Tokenizer) -> None:
    """Raise InputError for a model that reads images: its episodes cannot go on."""
    if tokenizer.images is not None:
        raise InputError(
            "episodes of agents cannot go on in the next step with a model that reads images",
            where="--rollout.partial, --agent",
            why="ids of images are those of one step",
            fix="use --batch.staleness with --sampling.during-updates",
        )


def make_agent_engine(agent: Agent, decoding: Decoding, scorer: Scorer) -> Engine:
    """Return the engine whose completions are the episodes of an agent."""
    engine = _AgentEngine(agent, decoding, scorer)
    return Engine(engine.generate, scorer)


class _Service(NamedTuple):
    """A server for the requests of a batch's episodes."""

    app: App
    server: Server
    accounts: dict[str | None, EpisodeAccount]
    """API key -> episode."""


@dataclass
class _Episode:
    """An episode whose function runs, or has ended."""

    pool: EnvironmentPool
    service: _Service
    account: EpisodeAccount
    key: np.ndarray
    """[2] uint32: its random key."""
    api_key: str
    pool_id: int
    call: str
    """The call of the pool that runs: reset, then reward."""
    future: Future[Reply]

    def wake(self, _: Any = None) -> None:
        """Let the thread that owns the devices look."""
        self.service.app.pump.wake()

    def reply(self) -> Reply | None:
        """Read the reply of the function; None while it runs."""
        if not self.future.done():
            return None
        reply = self.future.result()
        if self.call == "reward" or reply.fault:
            return reply
        self.call = "reward"
        self.future = self.pool.reward(self.pool_id)
        self.future.add_done_callback(self.wake)
        return None

    def end(self) -> None:
        """End the function, if it runs, and refuse further calls."""
        self.service.accounts.pop(self.api_key, None)
        self.pool.release(self.pool_id)

    def log(self) -> EpisodeLog:
        """Return the log, by which it goes on in another step."""
        turns = self.account.turns
        return EpisodeLog(0, self.key, turns, pool_id=self.pool_id, end=self.end)


@dataclass
class _Running:
    """The local episodes of a step, and how far they are."""

    batch: EpisodeBatch
    rounds: Rounds
    episodes: dict[int, _Episode] = field(default_factory=dict)
    counted: dict[int, int] = field(default_factory=dict)
    """Rounds of each episode that `rounds` knows of."""
    outcomes: dict[int, FinishedEpisode] = field(default_factory=dict)
    judged: set[int] = field(default_factory=set)
    """Groups whose episodes are over."""

    @property
    def first(self) -> int:
        """The number of the first of them."""
        return self.batch.local.start

    def add(self, number: int, episode: _Episode, waits: bool) -> None:
        """Add an episode, which waits until the step may have its next round, or does not."""
        self.episodes[number] = episode
        self.counted[number] = episode.account.num_rounds
        if waits:
            episode.account.allow(self.counted[number])

    def replies(self) -> dict[int, Reply]:
        """Read what functions returned that have ended, and count the rounds of all episodes."""
        going_on = {n: one for n, one in self.episodes.items() if n not in self.outcomes}
        # The ends first: an episode's last round came before its end.
        replies = {number: episode.reply() for number, episode in going_on.items()}
        for number, episode in going_on.items():
            for _ in range(episode.account.num_rounds - self.counted[number]):
                self.rounds.add_turn(number - self.first)
                self.counted[number] += 1
        return {number: reply for number, reply in replies.items() if reply is not None}

    def not_repeated(self, replies: Mapping[int, Reply]) -> list[int]:
        """List the episodes that did not ask again what their log has."""
        return [
            number
            for number, episode in self.episodes.items()
            if number not in self.outcomes
            and (
                episode.account.does_not_repeat
                or (number in replies and not episode.account.has_repeated)
            )
        ]

    def end(self, number: int, outcome: FinishedEpisode) -> None:
        """Note how an episode ended."""
        self.outcomes[number] = outcome
        self.rounds.end(number - self.first)

    def allow_rounds(self) -> None:
        """Let the calls begin whose round the step may have."""
        held = [n - self.first for n, one in self.episodes.items() if one.account.is_held]
        for number in self.rounds.may_begin(held):
            episode = self.episodes[number + self.first]
            episode.account.allow(self.counted[number + self.first] + 1)

    def judge(self) -> None:
        """Give groups that are complete to the reward functions."""
        first_group = self.first // self.batch.group_size
        complete = {first_group + group for group in self.rounds.complete}
        for group in sorted(complete - self.judged):
            self.judged.add(group)
            of_group = {number: self.outcomes[number] for number in self.batch.rows_of(group)}
            self.batch.streaming.on_answered(
                {n: one.messages for n, one in of_group.items()},
                {n: one.actions for n, one in of_group.items()},
            )

    @property
    def complete(self) -> dict[int, FinishedEpisode]:
        """The outcomes of the groups that are complete."""
        numbers = [number for group in self.judged for number in self.batch.rows_of(group)]
        return {number: self.outcomes[number] for number in numbers}


class _AgentEngine:
    def __init__(self, agent: Agent, decoding: Decoding, scorer: Scorer):
        self._agent = agent
        self._decoding = decoding
        self._scorer = scorer
        self._idle: list[_Service] = []
        """Services that no batch uses. Several batches may be sampled at once."""
        self._unfinished: dict[int, _Episode] = {}
        """By `pool_id`: the episodes that go on in the next step."""
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
        batch = EpisodeBatch(self._decoding, self._scorer, request)
        with batch.streaming, self._decoding.on_its_mesh():
            outcomes, unfinished, idle_seconds = self._run(params, batch)
        is_scored = any(episode.reward is not None for episode in outcomes.values())
        length = self._limits.max_model_len
        return batch.sampled(outcomes, unfinished, length, is_scored, idle_seconds)

    def _run(
        self, params: Params, batch: EpisodeBatch
    ) -> tuple[dict[int, FinishedEpisode], dict[int, EpisodeLog], float]:
        """Run all local episodes, until those that the step takes are over.

        Reward functions judge a group once its episodes are over. Returns the outcomes of all
        processes' episodes that are taken, the logs of the others, and the seconds in which nothing
        was decoded.
        """
        try:
            service = self._idle.pop()
        except IndexError:  # Threads may take one at the same moment.
            service = self._new_service()
        app = service.app
        app.images = batch.images
        length = self._limits.max_model_len
        prompt_length = self._decoding.max_prompt_tokens
        # Whatever the distribution: a run has one, and requests for others are refused.
        app.pump = pump = Pump(
            lambda _: batch.live_sampler(params, length, prompt_length, CONTEXTS_AT_ONCE), _share
        )
        request = batch.request
        local = batch.local
        rounds = batch.rounds(local)
        running = _Running(batch, rounds)

        def begin(number: int, log: EpisodeLog | None) -> None:
            row = request.rows[number // batch.group_size]
            pool_id = None if log is None else log.pool_id
            unfinished = None if pool_id is None else self._unfinished.pop(pool_id, None)
            key = batch.keys[number]
            episode = unfinished or self._new_episode(service, row, key, log, batch.images)
            episode.account.next_step(request.policy_step)
            running.add(number, episode, waits=request.first_groups is not None)

        try:
            for number in range(local.start, local.stop):
                begin(number, request.logs[number] if request.logs else None)
            while processes.any_of(not rounds.is_over):
                pump.step(POLL_SECONDS)
                signals.between_segments()
                replies = running.replies()
                for number in running.not_repeated(replies):
                    running.episodes[number].end()
                    begin(number, None)
                    self._note_no_replay(request.step)
                    replies.pop(number, None)
                for number, reply in replies.items():
                    account = running.episodes[number].account
                    account.is_over = True
                    for conversation in account.conversations.open:
                        pump.close(conversation)
                    prompt = request.rows[number // batch.group_size].get("prompt", "")
                    running.end(number, self._outcome(prompt, account, reply))
                running.allow_rounds()
                running.judge()
            outcomes = running.complete
            unfinished = {n: one for n, one in running.episodes.items() if n not in outcomes}
            self._unfinished = {episode.pool_id: episode for episode in unfinished.values()}
        finally:
            pump.end(InputError("the rollout has ended"))
            for episode in running.episodes.values():
                if episode.pool_id not in self._unfinished:
                    episode.end()
            self._idle.append(service)
        logs = {number: episode.log() for number, episode in unfinished.items()}
        return typed_json.merge(outcomes, FinishedEpisode, Branch), logs, pump.idle_seconds

    def _new_episode(
        self,
        service: _Service,
        row: Row,
        key: np.ndarray,
        log: EpisodeLog | None,
        images: ImageTable | None,
    ) -> _Episode:
        """Start an episode, or one of another process once more."""
        account = EpisodeAccount(
            self._scorer.tokenizer,
            self._numbers,
            row_key=key,
            first_prompt=self._first_prompt(row, images),
            most_calls=self._agent.max_calls,
            is_strict=self._decoding.purpose is not Purpose.EVALUATION,
            log=log.turns if log else (),
            wake=lambda: service.app.pump.wake(),
        )
        api_key = secrets.token_urlsafe(24)
        service.accounts[api_key] = account
        pool_id = next(_pool_ids)
        arguments = {
            "agent": self._agent.path,
            "row": dict(row),
            "base_url": service.server.url,
            "api_key": api_key,
        }
        pool = self._agent.pool
        future = pool.reset(pool_id, arguments)
        episode = _Episode(pool, service, account, key, api_key, pool_id, "reset", future)
        future.add_done_callback(episode.wake)
        return episode

    def _note_no_replay(self, step: int) -> None:
        print(
            f"note: an episode of --agent {self._agent.path} did not ask again what it had asked "
            f"before the run was resumed; it begins anew with the policy of step {step}",
            file=sys.stderr,
        )

    def _outcome(self, prompt: Any, account: EpisodeAccount, reply: Reply) -> FinishedEpisode:
        fault = reply.fault
        reward = reply.reward
        is_truncated = bool(fault and account.overlong and account.turns)
        if is_truncated:
            fault = ""
            reward = None if self._scorer.reward_functions else 0.0
        if fault and account.overlong:
            fault = (
                f"its first prompt has {account.overlong} tokens, and a conversation at most "
                f"{self._limits.max_model_len} (--sampling.max-prompt-tokens and "
                f"--sampling.max-new-tokens together); {fault}"
            )
        if not fault and not account.turns:
            fault = "it asked the policy for nothing"
        if not fault and reward is None and not self._scorer.reward_functions:
            fault = "it returned no reward, and no --reward judges what it did"
        branches = branches_of(account.turns)
        messages = account.history.last_messages()
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        messages = [without_images(message) for message in messages[places[0] :]] if places else []
        if not messages:
            token_ids = branches[-1].actions if branches else []
            content = self._scorer.tokenizer.decode(token_ids)
            messages = [{"role": "assistant", "content": content}]
        turns = account.turns
        step = account.policy_step
        earlier = [len(one.turn.tokens) for one in turns if one.policy_step < step]
        account.has_waited_for("agent")
        counts = {
            "turns": len(turns),
            "branches": len(branches) or 1,
            "errors": int(bool(fault)),
            "truncated": int(is_truncated),
            "observation_tokens": sum(branch.num_observed for branch in branches),
        }
        return FinishedEpisode(
            NAME,
            prompt,
            messages,
            branches or [_no_calls(self._scorer.tokenizer)],
            counts,
            reward,
            fault,
            waits=account.waits,
            policy_step=turns[0].policy_step if turns else step,
            num_earlier=sum(earlier),
        )

    def _first_prompt(self, row: Row, images: ImageTable | None) -> list[int] | None:
        """Return the ids of the row's prompt, if they can be told."""
        if "prompt" not in row:
            return None
        try:
            ids = self._scorer.tokenizer.encode_prompt(row["prompt"], row.get("tools"))
            return images.place(ids, sources_of(row)) if images else ids
        except InputError:
            return None

    def _new_service(self) -> _Service:
        """Return a service that answers, and lives as long as the process."""
        from tpu_rl.serving import routes  # The package starlette is there, as checked before.

        no_pump: Any = None
        # The server's thread lives on, and must not keep the engine with its weights.
        accounts: dict[str | None, EpisodeAccount] = {}
        app = App(
            no_pump,
            self._scorer.tokenizer,
            "policy",
            self._limits,
            self._distribution,
            accounts,
        )
        server = Server(routes.application(app), bind(LOOPBACK, 0))
        server.start()
        return _Service(app, server, accounts)


def _no_calls(tokenizer: Tokenizer) -> Branch:
    """Return the row of an episode without calls, which is not scored: an end of sequence."""
    end = tokenizer.eos_ids[0]
    return Branch(0, 0, [end, end], [False, True], [0.0, 0.0], [0.0, 0.0], True)


# --- several processes ---


def _share(items: list[Item]) -> list[list[Item]]:
    """Return the items of all processes, by index."""
    return typed_json.gather(items, PendingTurn, TurnRequest, Distribution)
