"""Threads that work on tasks one after the other, and live as long as the program.

They do not belong to an executor, because the interpreter waits for those when it exits. They never
end, because worker processes end with the thread that started them.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def submit(thread: str, task: Callable[[], T]) -> Future[T]:
    """Let the thread of a name do a task after those that it was given before.

    The future has the result, or whatever exception the task raised.
    """
    future: Future[T] = Future()
    _tasks(thread).put((future, task))
    return future


@functools.cache
def _tasks(name: str) -> queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]:
    """Return the queue of the thread of a name."""
    tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()

    def work_on(future: Future[Any], task: Callable[[], Any]) -> None:
        try:
            future.set_result(task())
        except BaseException as error:  # Raised again by whoever reads the result.
            future.set_exception(error)

    def work() -> None:
        while True:
            work_on(*tasks.get())  # Nothing here keeps the task, and what it holds, after it.

    threading.Thread(target=work, name=name, daemon=True).start()
    return tasks
