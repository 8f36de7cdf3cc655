#!/usr/bin/env python3
"""Mixed traffic over HTTP for as long as asked: clients that stay, leave or talk nonsense, memory for a few requests only, and
restarts, gentle and not. Ends with 1 when anything was lost.

  tests/serve/soak.py --minutes 30

- Whoever stays gets the answer that the request has alone: after any number of preemptions, and after a restart, since
  clients ask again.
- After SIGTERM every client is told: the whole answer, an error as the answer, or an error as the last event. Only kill -9
  may cut an answer.
- Whenever the traffic pauses, every page of keys and values is free or cached, nothing runs, waits or has failed, and
  threads are as many and descriptors no more than before; resident memory grows by 16 MB at most between two restarts.
"""

import argparse
import asyncio
import collections
import functools
import itertools
import json
import random
import signal
import sys
import time

from server import DATA, SANITIZED, SLOWER, Server, text_of
from streaming import connect, http, read_events, read_head

CLIENTS = 24
TAKEN_AFTER_S = 0.5 * SLOWER  # a request that was sent so long before a signal has been read by the server
# 4 layers, keys and values, one head of 128 float32: 64 pages of 16 tokens.
ARGS = ("--deterministic", "--threads", 1, "--max-model-len", 512, "--max-batch", 16, "--kv-memory", 64 * 16 * 4 * 2 * 128 * 4,
        "--shutdown-timeout", 1, "--served-model-name", "tiny", "--chat-template", DATA / "chat_templates" / "smollm2.jinja")
NONSENSE = [b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
            http({"prompt": "x", "temperature": -1}), http({"prompt": [1 << 40]}), http({"prompt": "x", "model": "other"}),
            http({"messages": [{"role": "user"}]}, "/v1/chat/completions"), http({"input_ids": []}, "/generate"),
            http({"prompt": "x" * 5000})]

TOTALS = ("vivace_preemptions_total", "vivace_sequences_cancelled_total", "vivace_sequences_finished_total")
COUNTS = ("left", "answered", "nonsense", "pauses compared")  # the soak's own

Answer = collections.namedtuple("Answer", "texts finish tokens")
Held = collections.namedtuple("Held", "threads descriptors resident_kb")


class Told(Exception):
    """The server says that it ends, or is not there."""


class Lost(Exception):
    """What must not happen."""


def requests(rng, count):
    """(path, body) of requests whose answers are a function of the request."""
    made = []
    system = "You are a careful storyteller who never hurries and never stops early. " * 2
    for number in range(count):
        body = {"max_tokens": rng.choice([1, 4, 16, 40, 120, 300]), "ignore_eos": rng.random() < 0.7,
                "temperature": rng.choice([0, 0, 0.8]), "seed": number, "stream": rng.random() < 0.6}
        if rng.random() < 0.2:
            body["n"] = 2
        if rng.random() < 0.2:
            body["stop"] = [" the", "\n"]
        if rng.random() < 0.2:
            body["frequency_penalty"] = 0.5
        kind = rng.random()
        if kind < 0.3:
            made.append(("/v1/chat/completions", {**body, "messages": [{"role": "system", "content": system},
                                                                       {"role": "user", "content": f"Story {number}."}]}))
        elif kind < 0.6:  # whole prefixes in common, and chunks of prompts
            made.append(("/v1/completions", {**body, "prompt": [7 + i % 900 for i in range(rng.randrange(100, 200))] + [number]}))
        else:
            made.append(("/v1/completions", {**body, "prompt": f"{number} times upon a time"}))
    return made


async def read_answer(reader, status, headers, leave_after=None):
    """The Answer; Told when it is an error of a server that ends; None when the client left after that many events."""
    choices = {}
    usage = None

    def add(event):
        nonlocal usage
        if "error" in event:
            if event["error"]["code"] == "shutting_down":
                raise Told
            raise Lost(f"an error instead of an answer: {event}")
        for choice in event["choices"]:
            text, finish = choices.get(choice["index"], ("", None))
            choices[choice["index"]] = (text + text_of(choice), choice["finish_reason"] or finish)
        usage = event.get("usage") or usage

    if headers.get("content-type") == "text/event-stream":
        done = False
        seen = 0
        async for payload in read_events(reader):
            done = payload == "[DONE]"
            if not done:
                add(json.loads(payload))
            seen += 1
            if seen == leave_after:
                return None
        if not done:
            raise Lost("a stream ended without a word")
    else:
        body = await reader.readexactly(int(headers["content-length"]))
        add(json.loads(body))
        if status != 200:
            raise Lost(f"status {status}: {body}")
    ordered = [choices[index] for index in sorted(choices)]
    return Answer([text for text, _ in ordered], [finish for _, finish in ordered], usage["completion_tokens"])


class Soak:
    def __init__(self, minutes, seed):
        self.rng = random.Random(seed)
        self.seconds = 60 * minutes
        self.pauses = 3 if minutes >= 1 else 2  # of one server; the first is what the others are compared with
        self.pause_after_s = min(60, self.seconds / 4)
        self.server = Server(*ARGS)
        self.port = self.server.port
        self.requests = requests(self.rng, 60 if minutes >= 1 else 16)
        self.alone = []
        self.go = asyncio.Event()
        self.active = 0
        self.over = False
        self.up = True
        self.ends = []  # the signals that servers have got, and when
        self.counts = collections.Counter()
        self.totals = collections.Counter()  # of the servers that were

    # Clients.

    async def exchange(self, data, read):
        """Sends `data` and returns what read(reader, status, headers) makes of the answer, or the sending when `read` is None. Told
        when the end of the server comes between, which only kill -9 may do to what it has had time to take."""
        was_up, ends = self.up, len(self.ends)
        begun = False
        writer = sent = None
        try:
            reader, writer = await connect(self.port)
            writer.write(data)
            sent = time.monotonic()
            if read is None:
                await asyncio.sleep(self.rng.random() * 0.05)
                return None
            async with asyncio.timeout(120 * SLOWER):
                status, headers = await read_head(reader)
                begun = True
                return await read(reader, status, headers)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            if was_up and ends == len(self.ends):
                raise Lost("a server that runs cuts a connection") from None
            how, at = self.ends[min(ends, len(self.ends) - 1)]  # the first signal since, or that of the server that was ending
            taken = begun or (sent is not None and sent < at - TAKEN_AFTER_S)
            if taken and how == signal.SIGTERM:
                raise Lost(f"SIGTERM cuts {'an answer' if begun else f'a request that came {at - sent:.2f} s before'}") from None
            refused = isinstance(error, ConnectionRefusedError)
            self.counts["cut by kill" if taken else "refused" if refused else "not taken"] += 1
            raise Told from None
        except TimeoutError:
            raise Lost("no answer for two minutes") from None
        finally:
            if writer:
                if self.rng.random() < 0.5:
                    writer.transport.abort()
                writer.close()

    async def ask(self, path, body, leave_after=None):
        if body.get("stream"):
            body = {**body, "stream_options": {"include_usage": True}}
        read = functools.partial(read_answer, leave_after=leave_after)
        return await self.exchange(http(body, path), None if leave_after == 0 else read)

    async def stay(self):
        number = self.rng.randrange(len(self.requests))
        path, body = self.requests[number]
        while True:
            try:
                answer = await self.ask(path, body)
                break
            except Told:  # the next server has to answer it
                self.counts["told, and asked again"] += 1
                await asyncio.sleep(0.05)
        if answer != self.alone[number]:
            raise Lost(f"{path} {body} gives {answer}, alone {self.alone[number]}")
        self.counts["answered"] += 1

    async def leave(self):
        path, body = self.rng.choice(self.requests)
        try:
            left = await self.ask(path, {**body, "max_tokens": 300, "ignore_eos": True}, self.rng.choice([0, 0, 1, 5, 30]))
            self.counts["left" if left is None else "answered before leaving"] += 1
        except Told:
            self.counts["told"] += 1

    async def babble(self):
        async def refusal(reader, status, headers):
            body = await reader.readexactly(int(headers["content-length"]))
            if not (400 <= status < 500 or status == 503) or "message" not in json.loads(body)["error"]:
                raise Lost(f"nonsense is answered {status}: {body}")

        try:
            await self.exchange(self.rng.choice(NONSENSE), refusal)
            self.counts["nonsense"] += 1
        except Told:
            self.counts["nonsense cut"] += 1

    async def client(self):
        while not self.over:
            await self.go.wait()
            if self.over or not self.go.is_set():  # a pause has begun since the event was set
                continue
            self.active += 1
            try:
                await self.rng.choices([self.stay, self.leave, self.babble], [75, 18, 7])[0]()
            finally:
                self.active -= 1

    # The server.

    async def pause(self):
        """Waits until every client has what it asked for; returns what then is there."""
        self.go.clear()
        limit = time.monotonic() + 120 * SLOWER
        while self.active:
            if time.monotonic() > limit:
                raise Lost(f"{self.active} clients wait for ever")
            await asyncio.sleep(0.01)
        metrics = await asyncio.to_thread(self.server.wait_idle, 10)
        if metrics["pages_not_held"] != metrics["vivace_kv_pages"] or metrics["vivace_sequences_failed_total"]:
            raise Lost(f"pages or requests are missing: {metrics}")
        return metrics

    async def check(self, before):
        """Pauses, and compares threads, descriptors and resident memory with the first pause of this server."""
        metrics = await self.pause()
        descriptors = []
        for _ in range(10):  # connections that clients have left are closed when their turn comes
            descriptors.append(self.server.descriptors())
            await asyncio.sleep(0.05)
        now = Held(self.server.status_kb("Threads"), min(descriptors), self.server.status_kb("VmRSS"))
        if before and (now.threads != before.threads or now.descriptors > before.descriptors
                       or (now.resident_kb > before.resident_kb + 16 * 1024 and not SANITIZED)):
            raise Lost(f"the first pause had {before}, this one has {now}")
        self.counts["pauses compared"] += before is not None
        print(f"{self.end - time.monotonic():6.0f} s left, {now.resident_kb} kB resident, "
              f"{metrics['vivace_preemptions_total']:.0f} preemptions, {dict(self.counts)}", flush=True)
        self.go.set()
        return before or now

    def add_totals(self):
        for name, value in self.server.metrics().items():
            if name in TOTALS:
                self.totals[name] += int(value)

    async def restart(self, how):
        """Ends the server under load and starts the next, which answers within three seconds."""
        self.add_totals()
        self.up = False
        self.ends.append((how, time.monotonic()))
        self.server.process.send_signal(how)
        code = await asyncio.to_thread(self.server.process.wait, 30 * SLOWER)
        if code != (0 if how == signal.SIGTERM else -signal.SIGKILL):
            raise Lost(f"the server ended with {code}: {self.server.output()[-2000:]}")
        old = self.server
        self.server = Server(*ARGS, port=self.port, wait=False)  # whatever happens from here on, main() ends it
        old.log.close()
        await asyncio.to_thread(self.server.wait_until_healthy)
        self.up = True
        if self.server.ready_after > 3 * SLOWER:
            raise Lost(f"the server is ready after {self.server.ready_after:.1f} s")
        self.counts[f"restarts by {how.name}"] += 1

    async def traffic(self):
        for path, body in self.requests:
            self.alone.append(await self.ask(path, body))
        self.end = time.monotonic() + self.seconds
        clients = [asyncio.create_task(self.client()) for _ in range(CLIENTS)]
        controller = asyncio.create_task(self.control())
        done, _ = await asyncio.wait([controller, *clients], return_when=asyncio.FIRST_EXCEPTION)
        self.over = True
        for task in done:
            task.result()

    async def control(self):
        self.go.set()
        for how in itertools.cycle([signal.SIGTERM, signal.SIGKILL]):
            first = None
            for _ in range(self.pauses):
                await asyncio.sleep(self.pause_after_s * (0.5 + self.rng.random()))
                first = await self.check(first)
            if time.monotonic() > self.end and len(self.ends) >= 2:
                break
            await asyncio.sleep(self.rng.random())
            await self.restart(how)
        self.over = True
        await self.pause()
        self.add_totals()
        self.go.set()  # clients see that it is over


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    soak = Soak(args.minutes, args.seed)
    failure = None
    try:
        asyncio.run(soak.traffic())
    except Lost as lost:
        failure = lost
        print(f"LOST: {lost}", file=sys.stderr)
        return 1
    except BaseException as other:
        failure = other
        raise
    finally:
        soak.server.__exit__(failure)
        print(json.dumps({**soak.counts, **soak.totals}, indent=1))
    if not all(soak.totals[name] for name in TOTALS) or not all(soak.counts[name] for name in COUNTS):
        print(f"none of one of {TOTALS + COUNTS}: this was no soak", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
