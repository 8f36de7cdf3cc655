"""200 clients at once, a part of them slow, gone or talking nonsense; then ends and restarts."""

import asyncio
import json
import random
import signal
import socket
import time

from server import Case, SANITIZED, SLOWER, Server, main
from streaming import connect, events, http, read_head

TOKENS = 64
CLIENTS = {"good": 140, "slow": 20, "gone": 20, "garbage": 20}
WRITE_TIMEOUT_S = 3
PROMPTS = [f"Story number {i}: once upon a time there was" for i in range(14)]
GARBAGE = [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)), b"GET\r\n\r\n", b"\r\n" * 400,
           b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n{}",
           b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
           b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\n\r\n{\"prompt\": \xff",
           b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
           b"GET /" + b"a" * 100_000, b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000,
           b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 6000\r\n\r\n" + b"[" * 6000]


async def read_stream(port, body):
    """(text, finish reasons, error events, whether [DONE] came)."""
    reader, writer = await connect(port)
    text, finish, errors, done = "", [], [], False
    try:
        writer.write(http({**body, "stream": True}))
        async for payload in events(reader):
            done = payload == "[DONE]"
            if done:
                continue
            event = json.loads(payload)
            if "error" in event:
                errors.append(event["error"])
                continue
            for choice in event["choices"]:
                text += choice["text"]
                finish += [choice["finish_reason"]] if choice["finish_reason"] else []
    finally:
        writer.close()
    return text, finish, errors, done


def greedy(prompt, **more):
    return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **more}


async def good(port, number):
    return await read_stream(port, greedy(PROMPTS[number % len(PROMPTS)]))


async def slow(port, number, all_cut):
    """Reads a byte a second of a long answer, then all that is left: whether the server had cut it off by then."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, http(greedy(f"{number} words", max_tokens=3000, logprobs=20, stream=True)))
        received = b""
        try:
            while not all_cut.is_set():
                received += await loop.sock_recv(client, 1)
                await asyncio.sleep(1)
            while part := await asyncio.wait_for(loop.sock_recv(client, 1 << 16), 60 * SLOWER):
                received = received[-100:] + part
        except ConnectionError:
            return True
        return b"[DONE]" not in received


async def gone(port, number):
    reader, writer = await connect(port)
    writer.write(http(greedy(f"{number} leave", max_tokens=2000, stream=True)))
    seen = 0
    async for _ in events(reader):
        seen += 1
        if seen == 20:
            break
    if number % 2:
        writer.transport.abort()
    else:
        writer.close()
    return seen


async def garbage(port, number):
    """The status that nonsense gets."""
    reader, writer = await connect(port)
    try:
        writer.write(GARBAGE[number % len(GARBAGE)])
        async with asyncio.timeout(60 * SLOWER):
            status, headers = await read_head(reader)
            json.loads(await reader.readexactly(int(headers["content-length"])))["error"]["message"]
            return status
    finally:
        writer.close()


async def all_at_once(server):
    """Results by kind of client, each with its number."""
    before = server.metrics()["vivace_sequences_cancelled_total"]
    all_cut = asyncio.Event()

    async def watch():
        end = time.monotonic() + 60 * SLOWER
        while time.monotonic() < end:
            cancelled = (await asyncio.to_thread(server.metrics))["vivace_sequences_cancelled_total"] - before
            if cancelled == CLIENTS["slow"] + CLIENTS["gone"]:
                break
            await asyncio.sleep(0.2)
        all_cut.set()

    kinds = {"good": good, "slow": lambda port, number: slow(port, number, all_cut), "gone": gone, "garbage": garbage}
    jobs = [(name, number) for name, count in CLIENTS.items() for number in range(count)]
    random.Random(3).shuffle(jobs)
    watching = asyncio.create_task(watch())
    results = await asyncio.gather(*(kinds[name](server.port, number) for name, number in jobs))
    await watching
    return {name: [(number, result) for (kind, number), result in zip(jobs, results) if kind == name] for name in kinds}


class Load(Case):
    def test_two_hundred_clients(self):
        # Each page is used before the first round: how far the slow clients come, which the clock decides, does not show in
        # resident memory.
        with Server("--deterministic", "--threads", 2, "--write-timeout", WRITE_TIMEOUT_S, "--kv-memory", "32M") as server:
            for number in range(100):
                if server.wait_idle(10)["vivace_kv_pages_free"] <= 4:
                    break
                self.assertEqual(server.complete(prompt=[10 + number] + [9] * 1023, max_tokens=1).status, 200)
            else:
                self.fail("pages stay free")
            alone = [server.complete(**greedy(prompt)).json["choices"][0]["text"] for prompt in PROMPTS]
            resident, threads = [], []
            for _ in range(2):
                start = time.monotonic()
                got = asyncio.run(all_at_once(server))
                print(f"a round took {time.monotonic() - start:.1f} s")
                for number, (text, finish, errors, done) in got["good"]:
                    self.assertEqual((text, finish, errors, done), (alone[number % len(PROMPTS)], ["length"], [], True))
                self.assertTrue(all(cut for _, cut in got["slow"]), "a slow reader was not cut")
                for number, status in got["garbage"]:
                    self.assertIn(status, range(400, 500), GARBAGE[number % len(GARBAGE)][:60])
                server.wait_idle(10)
                resident.append(server.status_kb("VmRSS"))
                threads.append(server.status_kb("Threads"))
            print(f"resident {resident} kB, threads {threads}")
            if not SANITIZED:  # which keep freed memory back
                self.assertLessEqual(resident[1] - resident[0], 16 * 1024)
            self.assertEqual(threads[0], threads[1])


class Pages(Case):
    def test_what_is_computed_twice_takes_memory_once(self):
        # 4 layers, keys and values, one head of 128 float32: 32 pages of 16 tokens, of which an answer takes 14.
        with Server("--deterministic", "--threads", 2, "--max-model-len", 512, "--kv-memory", 32 * 16 * 4 * 2 * 128 * 4) as server:
            def ask(**more):
                body = greedy(list(range(20, 36)), max_tokens=200, **more)
                texts = {choice["text"] for choice in server.complete(**body).json["choices"]}
                metrics = server.wait_idle(10)
                return texts, metrics["vivace_kv_pages_free"], metrics["vivace_preemptions_total"]

            texts, free, preemptions = ask(n=4)  # at once
            self.assertEqual((len(texts), preemptions), (1, 0))
            self.assertEqual(ask(), (texts, free, 0))  # and again
            texts, _, preemptions = ask(n=4, temperature=1, seed=1)
            self.assertEqual(len(texts), 4)
            self.assertGreater(preemptions, 0, "the case is what it says")


class Ends(Case):
    def test_sigterm_tells_every_client(self):
        with Server("--threads", 2, "--shutdown-timeout", 1) as server:
            async def scene():
                short = [asyncio.create_task(read_stream(server.port, greedy("a", max_tokens=8))) for _ in range(4)]
                long = [asyncio.create_task(read_stream(server.port, greedy(f"{i}", max_tokens=4000))) for i in range(12)]
                while server.metrics()["vivace_sequences_running"] < 12:
                    await asyncio.sleep(0.02)
                server.process.send_signal(signal.SIGTERM)
                return await asyncio.gather(*short), await asyncio.gather(*long)

            start = time.monotonic()
            short, long = asyncio.run(scene())
            self.assertEqual(server.process.wait(10 * SLOWER), 0)
            self.assertLess(time.monotonic() - start, 8 * SLOWER)
            for _, finish, errors, _ in short:
                self.assertTrue(finish == ["length"] or errors)
            for _, finish, errors, _ in long:  # whole, or told that the server ends: never cut without a word
                self.assertTrue(finish == ["length"] or (len(errors) == 1 and "message" in errors[0]), (finish, errors))
            self.assertTrue(any(errors for _, _, errors, _ in long), "the case is what it says")

    def test_a_terminal_that_closes_ends_it_in_order(self):
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            self.skipTest("under nohup")
        with Server("--threads", 1, "--shutdown-timeout", 0) as server:
            async def scene():
                stream = asyncio.create_task(read_stream(server.port, greedy("c", max_tokens=4000)))
                while server.metrics()["vivace_sequences_running"] < 1:
                    await asyncio.sleep(0.02)
                server.process.send_signal(signal.SIGHUP)
                return await stream

            _, _, errors, _ = asyncio.run(scene())
            self.assertEqual([error["code"] for error in errors], ["shutting_down"])
            self.assertEqual(server.process.wait(10 * SLOWER), 0)
            ends = [json.loads(line)["end"] for line in server.output().splitlines() if '"event":"request"' in line and "completions" in line]
            self.assertEqual(ends, ["failed"])

    def test_no_new_requests_while_it_ends(self):
        with Server("--threads", 2, "--shutdown-timeout", 3) as server:
            async def scene():
                running = asyncio.create_task(read_stream(server.port, greedy("b", max_tokens=4000)))
                while server.metrics()["vivace_sequences_running"] < 1:
                    await asyncio.sleep(0.02)
                server.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.3)
                try:
                    status = server.complete(prompt="x").status
                except OSError:
                    status = "refused"
                await running
                return status

            self.assertIn(asyncio.run(scene()), (503, "refused"))
            self.assertEqual(server.process.wait(10 * SLOWER), 0)

    def test_killed_and_started_again(self):
        with Server("--threads", 2) as server:
            port = server.port
            streams = [server.stream(prompt="x", max_tokens=4000, ignore_eos=True) for _ in range(8)]
            for stream in streams:
                next(stream.chunks())
            server.process.kill()
            server.process.wait()
            with Server("--threads", 2, port=port) as again:  # the same port, at once
                self.assertLess(again.ready_after, 3 * SLOWER)
                self.assertEqual(again.complete(prompt="x").status, 200)
            for stream in streams:
                stream.close()


if __name__ == "__main__":
    main()
