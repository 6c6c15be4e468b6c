"""Hostile and unusual clients on raw sockets, before a fake engine."""

import json
import os
import random
import socket
import sys
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from http_support import Server, closed, post, read_reply  # noqa: E402

LONG = '{"prompt":"hi","max_tokens":4000,"stream":true}'
LONG_QUIET = '{"prompt":"hi","max_tokens":4000}'


def reset(sock):
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()


class Transport(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server(
            "--max-output-bytes", "64K", "--keep-alive-timeout", "3", env={"QUIRE_FAKE_STEP_US": "2000"}
        )

    @classmethod
    def tearDownClass(cls):
        cls.server.__exit__()

    def alive(self):
        self.assertEqual(self.server.get("/health").status, 200)

    def idle(self):
        self.server.until(lambda: self.server.metric("vllm:num_requests_running{") == 0)

    def test_a_byte_at_a_time(self):
        with self.server.connect() as sock:
            for byte in post("/generate", '{"prompt":"hi","max_tokens":2}'):
                sock.sendall(bytes([byte]))
            self.assertEqual(read_reply(sock).status, 200)

    def test_pipelined(self):
        with self.server.connect() as sock:
            requests = b"".join(post("/tokenize", json.dumps({"prompt": "x" * i})) for i in range(1, 51))
            sock.sendall(requests)
            data = b""
            for i in range(1, 51):
                reply = read_reply(sock, data)
                data = reply.rest
                self.assertEqual(json.loads(reply.body)["count"], i)

    def test_body_too_large_is_told(self):
        """The client is still sending when it is refused, and must see the 413 all the same."""
        with self.server.connect() as sock:
            sock.sendall(b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Length: 1073741824\r\n\r\n")
            begun = time.monotonic()
            sock.setblocking(False)
            block, sent = b"x" * 65536, 0
            while sent < 8 << 20 and time.monotonic() - begun < 2:
                try:
                    sent += sock.send(block)
                except BlockingIOError:
                    time.sleep(0.001)
                except ConnectionError:
                    break
            sock.settimeout(5)
            reply = read_reply(sock)
            self.assertEqual(reply.status, 413)
            self.assertEqual(reply.headers["connection"], "close")
            self.assertIn("--max-body-bytes is 16777216", json.loads(reply.body)["error"]["message"])
        self.alive()

    def test_decided_at_the_byte(self):
        """A refusal comes within milliseconds of the byte that decides it, not at a time-out."""
        for start, status in (
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
            (b"GET / HTTP/1.1\n", 400),
            (b"GET /" + b"a" * 9000, 414),
            (b"GET / HTTP/1.1\r\nHost: t\r\nA: " + b"b" * 1048576, 431),
            (b"POST /generate HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\nffffff0\r\n", 413),
            (b"POST /generate HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n", 400),
            (b"POST /generate HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
            (b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\n", 415),
            (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
        ):
            with self.server.connect() as sock:
                begun = time.monotonic()
                try:
                    sock.sendall(start)
                except ConnectionError:
                    pass
                reply = read_reply(sock)
                self.assertEqual(reply.status, status, start[:60])
                self.assertLess(time.monotonic() - begun, 0.5)
                sock.shutdown(socket.SHUT_WR)
                self.assertTrue(closed(sock), start[:60])
        self.alive()

    def test_unknown(self):
        self.assertEqual(self.server.get("/nope").status, 404)
        reply = self.server.get("/generate")
        self.assertEqual(reply.status, 405)
        self.assertIn("POST", reply.headers["allow"])
        reply = self.server.post("/health", "{}")
        self.assertEqual(reply.status, 405)
        self.assertEqual(reply.headers["allow"], "GET, HEAD")

    def test_head(self):
        with self.server.connect() as sock:
            sock.sendall(b"HEAD /health HTTP/1.1\r\nHost: t\r\n\r\nGET /version HTTP/1.1\r\nHost: t\r\n\r\n")
            reply = read_reply(sock, no_body=True)
            self.assertEqual(reply.status, 200)
            self.assertGreater(int(reply.headers["content-length"]), 0)
            self.assertIn("version", json.loads(read_reply(sock, reply.rest).body))

    def test_expect_continue(self):
        with self.server.connect() as sock:
            body = b'{"prompt":"hi","max_tokens":2}'
            sock.sendall(b"POST /generate HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\n")
            sock.sendall(b"Content-Length: %d\r\n\r\n" % len(body))
            self.assertEqual(read_reply(sock).status, 100)
            sock.sendall(body)
            self.assertEqual(read_reply(sock).status, 200)
        with self.server.connect() as sock:
            sock.sendall(b"POST /nope HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n")
            self.assertEqual(read_reply(sock).status, 404)

    def test_chunked_body(self):
        with self.server.connect() as sock:
            sock.sendall(b"POST /generate HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n")
            for piece in (b'{"prompt"', b':"hi",', b'"max_tokens":2}'):
                sock.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            sock.sendall(b"0\r\n\r\n")
            self.assertEqual(json.loads(read_reply(sock).body)["text"][0][:2], "hi")

    def test_http_1_0(self):
        with self.server.connect() as sock:
            body = b'{"prompt":"hi","max_tokens":3,"stream":true}'
            sock.sendall(b"POST /generate HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            reply = read_reply(sock)
            self.assertEqual(reply.headers["connection"], "close")
            self.assertNotIn("transfer-encoding", reply.headers)
            self.assertEqual(reply.body.count(b'"text"'), 3)

    def gone(self, body, leave):
        before = self.server.metric('vllm:request_success_total{model_name="fake",engine="0",finished_reason="abort"')
        sock = self.server.connect()
        sock.sendall(post("/generate", body))
        if b"stream" in body.encode():
            self.assertTrue(sock.recv(100))
        self.server.until(lambda: self.server.metric("vllm:num_requests_running{") == 1)
        leave(sock)
        self.server.until(lambda: self.server.metric("vllm:num_requests_running{") == 0, 2)
        after = self.server.metric('vllm:request_success_total{model_name="fake",engine="0",finished_reason="abort"')
        self.assertEqual(after, before + 1)
        sock.close()

    def test_client_gone(self):
        for body in (LONG, LONG_QUIET):
            self.gone(body, lambda s: s.close())
            self.gone(body, reset)
            self.gone(body, lambda s: s.shutdown(socket.SHUT_WR))

    def test_gone_before_the_body(self):
        for _ in range(20):
            with self.server.connect() as sock:
                sock.sendall(b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\n{")
        self.idle()
        self.alive()

    def test_slow_reader_is_held_back(self):
        """Someone who does not read costs a bounded amount of memory and nobody else's time."""
        before = self.server.resident_kib()
        readers = []
        for _ in range(20):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", self.server.port))
            sock.sendall(post("/v1/completions", '{"model":"fake","prompt":"hi","max_tokens":8000,"stream":true}'))
            readers.append(sock)
        time.sleep(1.5)
        begun = time.monotonic()
        self.assertEqual(self.server.post("/generate", '{"prompt":"hi","max_tokens":2}').status, 200)
        self.assertLess(time.monotonic() - begun, 1)
        self.assertLess(self.server.resident_kib() - before, 20 * 1024)
        for sock in readers:
            sock.close()
        self.idle()

    def test_idle_connections_end(self):
        with self.server.connect() as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n")
            read_reply(sock)
            begun = time.monotonic()
            self.assertTrue(closed(sock, 8))
            self.assertGreater(time.monotonic() - begun, 2.5)

    def test_garbage(self):
        random.seed(7)
        for _ in range(300):
            with self.server.connect() as sock:
                try:
                    sock.sendall(random.randbytes(random.randint(1, 300)))
                    if random.random() < 0.5:
                        sock.shutdown(socket.SHUT_WR)
                except ConnectionError:
                    pass
        self.alive()

    def test_mutations(self):
        """A good request with a byte changed, dropped or doubled: a reply or a close, never a hang or a crash."""
        random.seed(11)
        good = post("/generate", '{"prompt":"hi","max_tokens":2}')
        for _ in range(300):
            data = bytearray(good)
            at = random.randrange(len(data))
            kind = random.randrange(3)
            if kind == 0:
                data[at] = random.randrange(256)
            elif kind == 1:
                del data[at]
            else:
                data.insert(at, data[at])
            with self.server.connect() as sock:
                try:
                    sock.sendall(bytes(data))
                    sock.shutdown(socket.SHUT_WR)
                except ConnectionError:
                    pass
                self.assertTrue(closed(sock), bytes(data))
        self.idle()
        self.alive()

    def test_idle_connections_are_cheap(self):
        before = self.server.resident_kib()
        socks = [self.server.connect() for _ in range(500)]
        for sock in socks:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n")
        for sock in socks:
            read_reply(sock)
        grown = self.server.resident_kib() - before
        for sock in socks:
            sock.close()
        self.assertLess(grown / 500, 2.0 + 256 / 500)  # KiB each, and a little for the whole


class Limits(unittest.TestCase):
    def test_connections(self):
        with Server("--max-connections", "4") as server:
            socks = [server.connect() for _ in range(4)]
            for sock in socks:
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n")
                self.assertEqual(read_reply(sock).status, 200)
            with server.connect() as extra:
                reply = read_reply(extra)
                self.assertEqual(reply.status, 503)
                self.assertIn("retry-after", reply.headers)
                extra.shutdown(socket.SHUT_WR)
                self.assertTrue(closed(extra))
            socks[0].close()
            server.until(lambda: server.get("/health").status == 200)
            for sock in socks:
                sock.close()

    def test_no_more_files_does_not_spin(self):
        with Server(limit_files=80) as server:
            socks = []
            for _ in range(120):
                try:
                    socks.append(server.connect(1))
                except OSError:
                    break
            time.sleep(0.3)
            before = server.cpu_seconds()
            time.sleep(1.5)
            self.assertLess(server.cpu_seconds() - before, 0.5)
            for sock in socks:
                sock.close()
            server.until(lambda: server.get("/health").status == 200)

    def test_slow_template_leaves_the_loop(self):
        """The first chat that takes long is the last on the loop, also where it only is counted."""
        messages = '{"messages":[{"role":"user","content":"hi"}],"max_tokens":1}'
        for first, second in (("/tokenize", "/tokenize"), ("/tokenize", "/v1/chat/completions"),
                              ("/v1/chat/completions", "/tokenize")):
            with Server(env={"QUIRE_FAKE_TEMPLATE_US": "700000"}) as server:
                self.assertEqual(server.post(first, messages).status, 200)
                with server.connect() as sock:
                    sock.sendall(post(second, messages))
                    time.sleep(0.1)
                    begun = time.monotonic()
                    self.assertEqual(server.get("/health/live").status, 200)
                    self.assertLess(time.monotonic() - begun, 0.4, (first, second))
                    self.assertEqual(read_reply(sock).status, 200)

    def test_more_prompts_than_the_queue_holds(self):
        with Server("--max-num-queued-reqs", "3") as server:
            for path, field in (("/v1/completions", "prompt"), ("/generate", "text")):
                body = {field: ["hi"] * 4, "max_tokens": 2}
                reply = server.post(path, json.dumps(body))
                self.assertEqual(reply.status, 400, reply.body)
                message = json.loads(reply.body)["error"]["message"]
                self.assertIn("%s must have at most 3 prompts" % field, message)
                self.assertIn("got 4", message)
                body[field] = ["hi"] * 3
                self.assertEqual(server.post(path, json.dumps(body)).status, 200)
            self.assertEqual(server.metric("vllm:num_requests_running"), 0)

    def test_queue_full(self):
        with Server("--max-num-queued-reqs", "1", "--max-num-seqs", "1", env={"QUIRE_FAKE_STEP_US": "20000"}) as server:
            socks = []
            statuses = []
            for _ in range(6):
                sock = server.connect()
                sock.sendall(post("/generate", '{"prompt":"hi","max_tokens":20}'))
                socks.append(sock)
            for sock in socks:
                reply = read_reply(sock)
                statuses.append(reply.status)
                if reply.status == 429:
                    self.assertGreaterEqual(int(reply.headers["retry-after"]), 1)
                sock.close()
            self.assertIn(200, statuses)
            self.assertIn(429, statuses)
            self.assertEqual(set(statuses), {200, 429})

    def test_keys(self):
        with Server("--api-key", "one", "two") as server:
            self.assertEqual(server.get("/v1/models").status, 401)
            self.assertEqual(server.get("/v1/models").headers["www-authenticate"], "Bearer")
            self.assertEqual(server.get("/nope").status, 401)
            self.assertEqual(server.get("/version").status, 401)
            self.assertEqual(server.get("/v1/models", "Authorization: Bearer onet\r\n").status, 401)
            self.assertEqual(server.get("/v1/models", "Authorization: Bearer two\r\n").status, 200)
            self.assertEqual(server.get("/nope", "Authorization: Bearer one\r\n").status, 404)
            for path in ("/health", "/health/live", "/health/ready", "/health/startup", "/ping", "/metrics"):
                self.assertEqual(server.get(path).status, 200, path)
            self.assertNotIn("one two", "".join(server.lines))
        with Server("--api-key", "one", "--metrics-auth") as server:
            self.assertEqual(server.get("/metrics").status, 401)
            self.assertEqual(server.get("/metrics", "Authorization: Bearer one\r\n").status, 200)


if __name__ == "__main__":
    unittest.main()
