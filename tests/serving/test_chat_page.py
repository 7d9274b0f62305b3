"""The page that talks to servers, in a real browser, and which pages may read their answers."""

import itertools
import threading
import urllib.request
from typing import Any

import pytest

from tests.fixtures import browser
from tests.fixtures.fake_sampler import HOT, LIMITS, TOKENIZER, Writer
from tpu_rl.serving import app, routes, server
from tpu_rl.serving.pump import Pump

ATTACK = "<img src=x onerror=window_attacked>"


class Server:
    """A server without a key, whose model answers everything with one text."""

    def __init__(self, name: str, text: str):
        self.pump = Pump(lambda distribution: self.writer(distribution, text))
        account = app.Account(TOKENIZER, itertools.count(), most_idle=2)
        application = app.App(self.pump, TOKENIZER, name, LIMITS, HOT, {None: account})
        application.has_page = True
        self.server = server.Server(routes.application(application), server.bind("127.0.0.1", 0))
        self.server.start()
        self.address = self.server.url.removesuffix("/v1")
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.decode, daemon=True)
        self.thread.start()

    @staticmethod
    def writer(distribution: Any, text: str) -> Any:
        writer = Writer(distribution)
        writer.texts |= {chr(code): text for code in range(128)}
        return writer

    def decode(self):
        while not self.is_over.is_set():
            self.pump.step(0.05)

    def stop(self):
        self.is_over.set()
        self.thread.join()
        self.server.stop()


@pytest.fixture(scope="module")
def servers():
    servers = [Server("first", "good day"), Server("second", "<b>bad</b>")]
    yield servers
    for one in servers:
        one.stop()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    if browser.executable() is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    with browser.open_page(tmp_path_factory.mktemp("browser")) as page:
        page.resize(1100)
        yield page


def shown(page, selector: str) -> list[str]:
    return page.evaluate(f"[...document.querySelectorAll('{selector}')].map(e => e.textContent)")


def say(page, text: str, answers: int) -> None:
    """Send a message, and wait until so many answers are whole."""
    page.evaluate(f"document.querySelector('#text').value = {text!r}")
    page.click("#send")
    count = "[...document.querySelectorAll('.answer')].filter(e => e.textContent).length"
    page.wait_for(f"running == null && {count} == {answers}")


def test_two_models_answer_side_by_side(page, servers):
    first, second = servers
    page.open_address(f"{first.address}/")
    page.evaluate(f"document.querySelector('#other').value = {second.address + '/v1/'!r}")
    page.click("#settings button")
    page.wait_for("[...document.querySelectorAll('h2')].map(e => e.textContent) == 'first,second'")
    say(page, "hello", 2)
    assert shown(page, ".answer") == ["good day", "<b>bad</b>"]
    assert page.evaluate("document.querySelectorAll('.answer b').length") == 0
    # The log-probs of the letters are -1, -2, ...
    titles = page.evaluate("[...document.querySelectorAll('.answer span')].map(e => e.title)")
    assert titles[:2] == ["-1.000 nats, 36.8 %", "-2.000 nats, 13.5 %"]
    page.click(".answer span")
    assert shown(page, "#about") == ['"g": -1.000 nats, 36.8 %']
    say(page, "again", 4)
    assert page.evaluate("columns[0].messages.map(m => m.role)") == ["user", "assistant"] * 2
    page.resize(360)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.resize(1100)
    assert page.log == []


def test_errors_and_plain_texts(page, servers):
    page.open_address(f"{servers[0].address}/")
    page.wait_for("document.querySelector('h2').textContent == 'first'")
    page.evaluate("document.querySelector('#most').value = '-3'")
    page.evaluate("document.querySelector('#ask').onsubmit(new Event('submit'))")
    assert shown(page, ".note") != []
    page.evaluate("document.querySelector('#text').value = 'x'")
    page.evaluate("document.querySelector('#ask').onsubmit(new Event('submit'))")
    page.wait_for("document.querySelector('.column .note')?.textContent.includes('max_tokens')")
    page.click("#anew")
    page.evaluate("document.querySelector('#most').value = '20'")
    page.click("#plain")
    say(page, "hello", 1)
    assert shown(page, ".answer") == ["good day"]


@pytest.mark.parametrize(
    ("origin", "may_read"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost:3000", True),
        ("http://[::1]:3000", True),
        ("https://127.0.0.1.example.com", False),
        ("http://127.0.0.1.example.com", False),
        ("http://example.com", False),
        ("null", False),
        ("", False),
    ],
)
def test_pages_of_this_machine_alone_may_read_answers(servers, origin, may_read):
    request = urllib.request.Request(servers[0].address, headers={"Origin": origin})
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert ("access-control-allow-origin" in answer.headers) == may_read


def test_a_server_says_who_may_ask(servers):
    address = f"{servers[0].address}/v1/chat/completions"
    headers = {"Origin": "http://localhost:1", "Access-Control-Request-Method": "POST"}
    request = urllib.request.Request(address, headers=headers, method="OPTIONS")
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.headers["access-control-allow-origin"] == "http://localhost:1"
    request = urllib.request.Request(servers[0].address, headers={"Origin": "http://a.example"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.headers["content-type"].startswith("text/html")
        assert "access-control-allow-origin" not in answer.headers
