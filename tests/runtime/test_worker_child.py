"""What all kinds of workers share, in this process."""

import asyncio
import threading
import time

from tpu_rl.runtime import worker_child


def test_threads_share_one_event_loop_also_if_they_ask_for_it_at_once(monkeypatch):
    new_event_loop = asyncio.new_event_loop

    def slowly():
        time.sleep(0.05)
        return new_event_loop()

    async def current():
        return asyncio.get_running_loop()

    monkeypatch.setattr(asyncio, "new_event_loop", slowly)
    worker_child._make_event_loop.cache_clear()
    loops = []
    threads = [
        threading.Thread(target=lambda: loops.append(worker_child.wait_for(current())))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loops) == 4
    assert len(set(loops)) == 1
