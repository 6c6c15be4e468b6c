"""Many clients of every dialect at once, half of whom leave early: nothing is left over, and the counters add up."""

import json
import os
import random
import socket
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from lib import Server  # noqa: E402

SECONDS = float(os.environ.get("QUIRE_MIX_SECONDS", "6"))
CLIENTS = int(os.environ.get("QUIRE_MIX_CLIENTS", "24"))


def body_of(rng):
    tokens, stream, n = rng.randint(1, 60), rng.random() < 0.7, rng.choice((1, 1, 1, 3))
    text = "word " * rng.choice((1, 3, 20))
    path, body = body_in(rng.randrange(6), text, tokens, stream, n)
    if rng.random() < 0.2:
        body["user"] = "u" * 10000  # a body that is read on a worker
    return path, body


def body_in(kind, text, tokens, stream, n):
    if kind == 0:
        return "/v1/completions", {
            "prompt": [text, "b"] if n > 1 else text,
            "max_tokens": tokens,
            "stream": stream,
            "n": n,
        }
    if kind == 1:
        return "/v1/chat/completions", {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "stream": stream,
            "logprobs": n > 1,
            "n": n,
        }
    if kind == 2:
        return "/generate", {"prompt": text, "max_tokens": tokens, "stream": stream, "n": n}
    if kind == 3:
        return "/generate", {
            "text": [text, "x"],
            "stream": stream,
            "sampling_params": {"max_new_tokens": tokens, "n": n},
        }
    if kind == 4:
        return "/generate_stream", {"inputs": text, "parameters": {"max_new_tokens": tokens}}
    return "/v1/completions", {"prompt": text, "max_tokens": tokens, "stop_token_ids": [10**9]}  # refused


class Client(threading.Thread):
    def __init__(self, server, seed, until):
        super().__init__()
        self.server, self.rng, self.until = server, random.Random(seed), until
        self.left = self.whole = self.refused = 0
        self.failure = None

    def run(self):
        try:
            while time.monotonic() < self.until:
                self.one()
        except Exception as error:  # shown by the test
            self.failure = error

    def one(self):
        path, body = body_of(self.rng)
        data = json.dumps(body).encode()
        sock = socket.create_connection((self.server.host, self.server.port), timeout=60)
        sock.sendall(
            b"POST %s HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            % (path.encode(), len(data))
            + data
        )
        if self.rng.random() < 0.5:
            how = self.rng.randrange(3)
            if how == 0:
                time.sleep(self.rng.random() * 0.02)
            elif how == 1:
                sock.recv(self.rng.randint(1, 400))
            sock.close()
            self.left += 1
            return
        reply = b""
        while True:
            piece = sock.recv(65536)
            if not piece:
                break
            reply += piece
        sock.close()
        status = int(reply[9:12])
        if status in (400, 422):
            self.refused += 1
        elif status != 429:
            assert status == 200, reply[:300]
            if b"chunked" in reply[:400]:
                assert reply.endswith(b"0\r\n\r\n"), reply[-200:]
            else:
                json.loads(reply.split(b"\r\n\r\n", 1)[1])
            self.whole += 1


class Mix(unittest.TestCase):
    def test_mix(self):
        server = Server(
            fake="QUIRE_URL" not in os.environ and "QUIRE_MIX_REAL" not in os.environ, env={"QUIRE_FAKE_STEP_US": "300"}
        )
        try:
            until = time.monotonic() + SECONDS
            clients = [Client(server, seed, until) for seed in range(CLIENTS)]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
            failures = [c.failure for c in clients if c.failure]
            self.assertEqual(failures, [])
            self.assertGreater(sum(c.left for c in clients), CLIENTS)
            self.assertGreater(sum(c.whole for c in clients), 0)
            self.assertGreater(sum(c.refused for c in clients), 0)
            server.until(
                lambda: server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") == 0, 20
            )
            server.until(lambda: server.get("/load").json() == {"server_load": 0})
            self.assertEqual(
                server.metric("quire:requests_admitted_total"), server.metric("vllm:request_success_total")
            )
            # And it still answers.
            self.assertEqual(server.post("/generate", {"prompt": "a", "max_tokens": 1}).status, 200)
        finally:
            server.close()


if __name__ == "__main__":
    unittest.main()
