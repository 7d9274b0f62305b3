"""Train on environments of verifiers v1: `--agent recipes/verifiers/agent.py:run`.

verifiers has about 100 packages, so it lives in an environment of its own. VERIFIERS_PYTHON names
the Python there. Each worker starts `runner.py` with it once, and sends it all its episodes.
"""

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path

_ids = itertools.count()
_waiting = {}
_start = None


async def run(row, base_url, api_key):
    """Run the episode of a row {"taskset", "idx"}, and return its reward."""
    global _start
    if _start is None:
        _start = asyncio.create_task(_start_runner())
    process = await asyncio.shield(_start)
    number = next(_ids)
    answered = _waiting[number] = asyncio.get_running_loop().create_future()
    ask = {"id": number, "taskset": row["taskset"], "idx": row["idx"]}
    ask |= {"base_url": base_url, "api_key": api_key}
    process.stdin.write(json.dumps(ask).encode() + b"\n")
    await process.stdin.drain()
    answer = await answered
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["reward"]


async def _start_runner():
    global _reading
    process = await asyncio.create_subprocess_exec(
        os.environ.get("VERIFIERS_PYTHON", sys.executable),
        str(Path(__file__).with_name("runner.py")),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    _reading = asyncio.create_task(_read(process))
    return process


async def _read(process):
    """Give the runner's answers to those who wait."""
    while line := await process.stdout.readline():
        answer = json.loads(line)
        _waiting.pop(answer["id"]).set_result(answer)
    for answered in _waiting.values():
        answered.set_exception(RuntimeError(f"the runner ended: {await process.wait()}"))
    _waiting.clear()
