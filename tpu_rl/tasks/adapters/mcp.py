"""Servers of the Model Context Protocol as environments: `mcp:COMMAND`.

The command starts a server that talks over its standard input and output. Its tools are those of
the episode, and each episode has a process of its own. The server sees PATH, HOME and the like of
the environment's variables, and no others. What a tool returns is the observation, pictures apart.
A tool's error is one that the model reads; a server that ends is a fault of its episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shlex
from collections.abc import AsyncIterator
from typing import Any

from tpu_rl.environments.contract import Factory, Fault
from tpu_rl.errors import InputError, TpuRlError
from tpu_rl.runtime import worker_child
from tpu_rl.tasks import adapters

START_SECONDS = 30.0
"""Time in which a server answers its first requests. That of calls is
--environment-limits.call-seconds."""
CLOSED = -32000
"""The code of an error of a connection that has ended."""
MOST_PAGES = 100
"""Pages of the list of tools."""


@contextlib.asynccontextmanager
async def connected(words: list[str]) -> AsyncIterator[Any]:
    """Start a server, and yield the session with it."""
    mcp = adapters.require("mcp")
    parameters = mcp.StdioServerParameters(command=words[0], args=words[1:])
    with open(os.devnull, "w") as nowhere:
        async with (
            mcp.stdio_client(parameters, errlog=nowhere) as (reads, writes),
            mcp.ClientSession(reads, writes) as session,
        ):
            await asyncio.wait_for(session.initialize(), START_SECONDS)
            yield session


async def list_tools(words: list[str]) -> list[dict[str, Any]]:
    """Return the schemas of a server's tools, as chat templates read them."""
    schemas = []
    async with connected(words) as session:
        cursor = None
        for _ in range(MOST_PAGES):
            page = await asyncio.wait_for(_page(session, cursor), START_SECONDS)
            schemas += [_schema(tool) for tool in page["tools"]]
            cursor = page.get("nextCursor")
            if not cursor:
                break
    return schemas


async def _page(session: Any, cursor: str | None) -> dict[str, Any]:
    types = adapters.require("mcp.types")
    params = types.PaginatedRequestParams(cursor=cursor) if cursor else None
    return _plain(await session.list_tools(params=params))


def _plain(value: Any) -> Any:
    """Return a message with the names of the protocol, which the package's versions share."""
    return value.model_dump(by_alias=True, mode="json", exclude_none=True)


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}, **tool.get("inputSchema", {})}
    function = {"name": tool["name"], "description": tool.get("description", "")}
    return {"type": "function", "function": {**function, "parameters": parameters}}


def factory(command: str) -> Factory:
    """Return the class of a server's environments, whose tools are listed once.

    Raises:
        InputError: if the server does not start, or has no tool, or one whose name cannot be.
        MachineError: if the package is not installed.
    """
    words = shlex.split(command)
    where = f"--environment mcp:{command}"
    adapters.require("mcp")
    if not words:
        raise InputError("no server to start", where=where, fix="mcp:COMMAND, as in a shell")
    schemas = _listed(tuple(words), where)
    names = [schema["function"]["name"] for schema in schemas]
    reserved = [name for name in names if name.startswith("_") or hasattr(Server, name)]
    if not names:
        raise InputError("the server has no tools", where=where, fix="look at the server")
    if reserved:
        raise InputError(
            f"a tool may not have the name {reserved[0]!r}",
            where=where,
            why="methods of environments have these names",
            fix="rename it in the server",
        )
    methods = {name: _method(name) for name in names}
    return type("McpServer", (Server,), {"_words": words, "tool_schemas": schemas, **methods})


@functools.cache
def _listed(words: tuple[str, ...], where: str) -> list[dict[str, Any]]:
    try:
        return worker_child.wait_for(list_tools([*words]))
    except TpuRlError:
        raise
    # The server and the package may raise anything.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise InputError(
            "the MCP server does not answer",
            where=where,
            why=_reason(error),
            fix="try the command in a shell: it must read and write the protocol, and no more",
        ) from None


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return worker_child.describe(error)


def _method(name: str) -> Any:
    async def method(self: Server, /, **arguments: Any) -> str:
        return await self._call(name, arguments)

    return method


class Server:
    """An episode with a server of its own."""

    tool_schemas: list[dict[str, Any]] = []
    _words: list[str] = []

    def __init__(self):
        self._session: Any = None
        self._task: asyncio.Task[None] | None = None
        self._is_over = asyncio.Event()

    async def reset(self) -> None:
        """End the server of the episode before, and start another."""
        await self._stop()
        self._is_over = asyncio.Event()
        started: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(started, self._is_over))
        self._session = await started

    async def _stop(self) -> None:
        self._is_over.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self, started: asyncio.Future[Any], is_over: asyncio.Event) -> None:
        """Hold the session: what opens it must close it, in one task."""
        try:
            async with connected(self._words) as session:
                started.set_result(session)
                await is_over.wait()
        except BaseException as error:
            if not started.done():
                started.set_exception(RuntimeError(_reason(error)))
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        try:
            answer = _plain(await self._session.call_tool(name, arguments))
        except Exception as error:
            code = getattr(getattr(error, "error", None), "code", None)
            if code == CLOSED or self._task is None or self._task.done():
                raise Fault(f"the MCP server has ended: {_reason(error)}") from None
            raise
        blocks = answer.get("content", [])
        text = "\n".join(
            block["text"] if block.get("type") == "text" else f"[{block.get('type')}]"
            for block in blocks
        )
        if answer.get("isError"):
            raise RuntimeError(text)
        return text
