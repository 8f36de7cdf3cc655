"""HTTP for very many clients at once: requests and streams of events over asyncio."""

import asyncio
import json


def http(body, path="/v1/completions"):
    content = json.dumps(body).encode()
    return (f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
            "\r\n").encode() + content


async def connect(port):
    return await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)


async def read_head(reader):
    """(status, headers by name in lower case)."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
    headers = (line.split(":", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.lower(): value.strip() for name, value in headers}


async def read_events(reader):
    """Payloads of the events of a stream, after its head; ConnectionError or IncompleteReadError when it is cut."""
    while True:
        size = int((await reader.readuntil(b"\r\n")).strip(), 16)
        chunk = await reader.readexactly(size + 2)
        if size == 0:
            return
        yield chunk[6:-4].decode("utf-8")


async def events(reader):
    """The same with its head, which has to be a success."""
    status, _ = await read_head(reader)
    if status != 200:
        raise ConnectionError(f"status {status}")
    async for payload in read_events(reader):
        yield payload
