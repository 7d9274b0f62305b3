"""Runs environments of verifiers v1, in a Python that has verifiers.

    python runner.py rows TASKSET [COUNT]     print the tasks as rows of data, one a line
    python runner.py                          run an episode for each line of standard input

A line is {"id", "taskset", "idx", "base_url", "api_key"}, and is answered by {"id", "reward"} or
{"id", "error"}. Episodes run at the same time.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import verifiers.v1 as vf  # noqa: E402


def make(taskset):
    """Return the environment that a taskset comes with."""
    return vf.load_environment(vf.resolve_env_config({"taskset": {"id": taskset}}))


def print_rows(taskset, count):
    """Print rows of data. The prompt is for people and filters: the environment has its own."""
    for task in itertools.islice(make(taskset).taskset, count):
        row = {"prompt": task.data.prompt_text, "taskset": taskset, "idx": task.data.idx}
        print(json.dumps(row))


class Environments:
    """The environments that serve. One ends with its last episode, because verifiers keeps a client
    for each API key until then."""

    def __init__(self):
        self.known = {}
        self.lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def serving(self, taskset):
        """Yield (environment, its tasks)."""
        async with self.lock:
            if taskset not in self.known:
                environment = make(taskset)
                stack = contextlib.AsyncExitStack()
                await stack.enter_async_context(environment.serving())
                self.known[taskset] = [environment, list(environment.taskset), stack, 0]
            known = self.known[taskset]
            known[-1] += 1
        try:
            yield known[:2]
        finally:
            async with self.lock:
                known[-1] -= 1
                if not known[-1]:
                    del self.known[taskset]
                    await known[2].aclose()


async def run(environments, ask):
    """Run one episode, and print its reward."""
    # verifiers reads keys from the environment of the process.
    variable = f"EPISODE_KEY_{ask['id']}"
    os.environ[variable] = ask["api_key"]
    try:
        client = vf.EvalClientConfig(base_url=ask["base_url"], api_key_var=variable)
        context = vf.ModelContext(model="policy", client=client)
        async with environments.serving(ask["taskset"]) as (environment, tasks):
            episode = await environment.run_episode(tasks[ask["idx"]], context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        answer = {"reward": sum(trace.reward for trace in episode.traces)}
        if errors:
            answer = {"error": f"{errors[0].type}: {errors[0].message}"}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    finally:
        del os.environ[variable]
    print(json.dumps({"id": ask["id"], **answer}), flush=True)


async def main():
    """Answer lines until the input ends."""
    reader = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    environments = Environments()
    tasks = set()
    while line := await reader.readline():
        task = asyncio.create_task(run(environments, json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    if sys.argv[1:2] == ["rows"]:
        print_rows(sys.argv[2], int(sys.argv[3]) if sys.argv[3:] else None)
    else:
        asyncio.run(main())
