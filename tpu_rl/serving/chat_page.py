"""A page to talk to one server, or to two side by side, with the log-prob of each token.

It is one file without outside parts. What a model writes becomes text, never markup. The second
server may be another one of this machine: pages of loopback addresses may read its answers
(`LOOPBACK_ORIGIN`).
"""

from __future__ import annotations

import base64
import hashlib

LOOPBACK_ORIGIN = r"http://(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?"
"""The origins whose pages may read answers."""


STYLE = """
:root { color-scheme: light dark; --ink: #1f2430; --muted: #6b7280; --line: #e6e8ec;
  --paper: #fff; --blue: #2a6496; --poor: 181, 73, 91; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ec; --muted: #9aa3b0; --line: #2b3039;
  --paper: #15181e; --blue: #74b0e2; --poor: 229, 138, 153; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 20px 16px; }
form { display: flex; flex-wrap: wrap; gap: 8px 16px; align-items: center; margin-bottom: 14px; }
label { color: var(--muted); font-size: 13px; }
input, textarea, button { font: inherit; color: inherit; background: var(--paper);
  border: 1px solid var(--line); border-radius: 5px; padding: 4px 8px; }
input[type=number] { width: 84px; }
textarea { flex: 1 1 100%; min-height: 66px; }
#columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr));
  gap: 24px; }
h2 { font-size: 16px; margin: 0 0 8px; overflow-wrap: anywhere; }
.user, .answer, .note { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 10px; }
.user { color: var(--muted); } .note { color: var(--blue); font-size: 13px; }
.answer span { border-radius: 2px; cursor: help; }
"""

SCRIPT = """
'use strict';
const $ = id => document.getElementById(id);
const columns = [];
let running = null;

function add(parent, tag, kind, text) {
  const element = document.createElement(tag);
  element.className = kind;
  element.textContent = text;
  parent.append(element);
  return element;
}

function headers() {
  const key = $('key').value;
  const kind = {'Content-Type': 'application/json'};
  return key ? {...kind, Authorization: 'Bearer ' + key} : kind;
}

class Column {
  constructor(base) {
    this.base = base;
    this.element = add($('columns'), 'section', 'column', '');
    this.title = add(this.element, 'h2', '', base || location.origin);
    this.begin();
    fetch(base + '/v1/models', {headers: headers()}).then(answer => answer.json()).then(
      list => { this.title.textContent = list.data[0].id; },
      () => { this.note('no server answers at ' + (base || location.origin)); });
  }
  begin() {
    this.messages = [];
    while (this.title.nextSibling) this.title.nextSibling.remove();
  }
  note(text) { add(this.element, 'p', 'note', text); }
  token(answer, text, logProb) {
    const part = add(answer, 'span', '', text);
    if (typeof logProb != 'number') return;
    const share = Math.exp(logProb);
    part.style.background = `rgba(var(--poor), ${(0.6 * (1 - share)).toFixed(3)})`;
    part.title = `${logProb.toFixed(3)} nats, ${(100 * share).toFixed(1)} %`;
    part.onclick = () => { $('about').textContent = JSON.stringify(text) + ': ' + part.title; };
  }
  async ask(text, signal) {
    add(this.element, 'p', 'user', text);
    const answer = add(this.element, 'p', 'answer', '');
    const isPlain = $('plain').checked;
    const settings = {
      stream: true, temperature: +$('temperature').value, max_tokens: +$('most').value};
    const asked = [...this.messages, {role: 'user', content: text}];
    const body = isPlain ? {prompt: text, logprobs: 0} : {messages: asked, logprobs: true};
    const path = isPlain ? '/v1/completions' : '/v1/chat/completions';
    try {
      const reply = await fetch(this.base + path, {
        method: 'POST', headers: headers(), body: JSON.stringify({...body, ...settings}), signal});
      if (!reply.ok) throw new Error((await reply.json()).error.message);
      await this.read(reply.body.getReader(), data => {
        if (data.error) throw new Error(data.error.message);
        for (const choice of data.choices) {
          const shown = choice.logprobs;
          if (isPlain) this.token(answer, choice.text, shown?.token_logprobs?.[0]);
          else if (choice.delta.content)
            this.token(answer, choice.delta.content, shown?.content?.[0].logprob);
        }
      });
    } catch (error) {
      this.note(error.name == 'AbortError' ? 'stopped' : error.message);
    }
    // A message without an answer is not part of the conversation.
    if (!isPlain && answer.textContent)
      this.messages = [...asked, {role: 'assistant', content: answer.textContent}];
  }
  async read(reader, use) {
    const decoder = new TextDecoder();
    for (let buffer = ''; ;) {
      const {done, value} = await reader.read();
      if (done) return;
      const events = (buffer + decoder.decode(value, {stream: true})).split('\\n\\n');
      buffer = events.pop();
      for (const event of events)
        for (const line of event.split('\\n'))
          if (line.startsWith('data: ') && line != 'data: [DONE]') use(JSON.parse(line.slice(6)));
    }
  }
}

function connect() {
  columns.splice(0).forEach(column => column.element.remove());
  const other = $('other').value.trim().replace(/(\\/v1)?\\/*$/, '');
  columns.push(...['', ...(other ? [other] : [])].map(base => new Column(base)));
}

$('settings').onsubmit = event => { event.preventDefault(); connect(); };
$('ask').onsubmit = async event => {
  event.preventDefault();
  const text = $('text').value;
  if (!text.trim() || running) return;
  $('text').value = '';
  running = new AbortController();
  await Promise.all(columns.map(column => column.ask(text, running.signal)));
  running = null;
};
$('text').onkeydown = event => {
  if (event.key == 'Enter' && !event.shiftKey) { event.preventDefault(); $('ask').requestSubmit(); }
};
$('stop').onclick = () => running?.abort();
$('anew').onclick = () => { running?.abort(); columns.forEach(column => column.begin()); };
connect();
"""

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; "
    "connect-src 'self' http://127.0.0.1:* http://localhost:*; "
    f"script-src 'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
)

PAGE = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>Chat</title>
<style>{STYLE}</style>
<main>
<form id="settings">
<label>second server <input id="other" placeholder="http://127.0.0.1:8001"></label>
<label>key <input id="key" type="password" autocomplete="off"></label>
<button>connect</button>
<label>temperature
<input id="temperature" type="number" value="1" min="0" max="10" step="any"></label>
<label>tokens at most <input id="most" type="number" value="256" min="1"></label>
<label><input id="plain" type="checkbox"> plain text, without a chat template</label>
</form>
<div id="columns"></div>
<p class="note" id="about">Red tokens were unlikely. Click one for its log-prob.</p>
<form id="ask">
<textarea id="text" aria-label="message" autofocus></textarea>
<button id="send">send</button>
<button type="button" id="stop">stop</button>
<button type="button" id="anew">new conversation</button>
</form>
</main>
<script>{SCRIPT}</script>
</html>
"""
"""The page. Its policy runs this script alone, which may ask servers of this machine."""
