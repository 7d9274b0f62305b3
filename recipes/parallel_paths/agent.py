"""Parallel paths with a summary (Parallel-R1, arXiv 2509.07980), as an agent:
`--agent recipes/parallel_paths/agent.py:run`.

    text <Parallel> <Path>a</Path> <Path>b</Path> </Parallel> <Summary>s</Summary> text

Where the policy writes <Parallel>, it goes on from there once for each path, in requests of their
own: no path sees another. What comes after the block reads all of them. All requests of an episode
learn from its reward, a path's tokens where the path was written:

    right answer    1 + BONUS ln(1 + blocks)
    wrong answer   -1 - PENALTY ln(1 + blocks)

The answer is the last number of the text. A row has a `prompt`, a text to continue, and an
`answer`, a number.
"""

import asyncio
import json
import math
import re
import urllib.request

OPEN, CLOSE = "<Parallel>", "</Parallel>"
PATH, END = "<Path>", "</Path>"
SUMMARY = "<Summary>"
PATHS = 2
BLOCKS = 4
"""The most blocks of a completion; a further <Parallel> is plain text."""
BONUS, PENALTY = 0.6, 0.1


async def run(row, base_url, api_key):
    """Answer a row with parallel paths, and return the reward."""

    async def write(text, stop):
        return await asyncio.to_thread(ask, base_url, api_key, prompt=text, stop=stop)

    text = row["prompt"]
    blocks = 0
    while True:
        answer, found = await write(text, OPEN if blocks < BLOCKS else None)
        text += answer
        if not found:
            break
        blocks += 1
        text += OPEN
        paths = await asyncio.gather(*(write(text + PATH, END) for _ in range(PATHS)))
        text += "".join(PATH + path + END for path, _ in paths) + CLOSE + SUMMARY
    return reward(text[len(row["prompt"]) :], row["answer"], blocks)


def reward(text, answer, blocks):
    """Return the reward of a completion with some blocks; +-1 for its last number."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
    extra = math.log1p(blocks)
    if numbers and float(numbers[-1]) == float(answer):
        return 1 + BONUS * extra
    return -1 - PENALTY * extra


def ask(base_url, api_key, prompt, stop):
    """Return what the policy writes after a prompt, up to `stop`, and whether that ended it."""
    body = {"prompt": prompt} | ({"stop": stop} if stop else {})
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{base_url}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        choice = json.load(response)["choices"][0]
    return choice["text"], choice["stop_reason"] is not None
