"""deploy/proxy: HAProxy and nginx, started with these files in front of two servers. Tokens pass one by one, a client
that goes away reaches the engine, a server that died or drains is left out, and a POST is never computed twice."""

import http.client
import json
import os
import signal
import socket
import sys
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from http_support import REAL, Server, default_model, post, read_reply  # noqa: E402
from proxy_support import Proxy, Recorder, find  # noqa: E402

STEP_US = 40000
STREAM = '{"model":"fake","prompt":"hi","max_tokens":%d,"stream":true}'
SHORT = '{"model":"fake","prompt":"hi","max_tokens":1}'


def ask(port, body=SHORT, headers=None, path="/v1/completions"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", path, body, {"Content-Type": "application/json", **(headers or {})})
    response = connection.getresponse()
    out = response.status, response.read().decode()
    connection.close()
    return out


def begin(port, tokens, timeout=20):
    """A stream whose first token came."""
    sock = socket.create_connection(("127.0.0.1", port), timeout)
    sock.sendall(post("/v1/completions", STREAM % tokens))
    data = b""
    while b"data:" not in data:
        data += sock.recv(65536)
    return sock, data


class Both:
    """The tests, for a proxy of KIND."""

    KIND = ""

    @classmethod
    def setUpClass(cls):
        if not find(cls.KIND):
            raise unittest.SkipTest("skipped: no %s here (tests/run fetches it)" % cls.KIND)
        cls.servers = []
        cls.addClassCleanup(lambda: [s.__exit__() for s in cls.servers])
        for _ in range(2):
            cls.servers.append(cls.start())
        cls.proxy = Proxy(cls.KIND, [s.port for s in cls.servers])
        cls.addClassCleanup(cls.proxy.close)

    @classmethod
    def start(cls, port=0, **more):
        environment = {"QUIRE_FAKE_STEP_US": str(STEP_US)}
        return Server("--port", str(port), "--shutdown-timeout", "20", env=environment, **more)

    def taken(self):
        return [int(s.metric("quire:requests_submitted_total")) for s in self.servers]

    def running(self):
        return [int(s.metric("vllm:num_requests_running")) for s in self.servers]

    def test_tokens_one_by_one(self):
        sock, data = begin(self.proxy.port, 25)
        times = [time.monotonic()]
        while b"[DONE]" not in data:
            data += sock.recv(65536)
            times.append(time.monotonic())
        sock.close()
        gaps = sorted(b - a for a, b in zip(times, times[1:]))
        self.assertGreaterEqual(len(gaps), 20, "tokens came together")
        self.assertLess(abs(gaps[len(gaps) // 2] - STEP_US * 1e-6), 0.6 * STEP_US * 1e-6, gaps)
        self.assertLess(gaps[-1], 0.8, "some were held back")

    def test_spread(self):
        before = self.taken()
        streams = [begin(self.proxy.port, 60)[0] for _ in range(6)]
        self.servers[0].until(lambda: sum(self.taken()) == sum(before) + 6)
        after = self.taken()
        for sock in streams:
            sock.close()
        self.assertEqual([b - a for a, b in zip(before, after)], [3, 3], "the one with the fewest gets the next")

    def test_disconnect_reaches_the_engine(self):
        streams = [begin(self.proxy.port, 4000)[0] for _ in range(4)]
        self.servers[0].until(lambda: sum(self.running()) == 4)  # what metrics tell is a moment old
        for sock in streams:
            sock.close()
        begun = time.monotonic()
        while sum(self.running()) and time.monotonic() - begun < 5:
            time.sleep(0.02)
        self.assertEqual(sum(self.running()), 0, "still computed for nobody")
        self.assertLess(time.monotonic() - begun, 1.0)

    def test_sessions_stay(self):
        one, two = Recorder(), Recorder()
        proxy = Proxy(self.KIND, [one.port, two.port])
        try:
            time.sleep(0.3)  # until the first checks passed
            for turn in range(48):
                self.assertEqual(ask(proxy.port, headers={"X-Session-Id": "s%d" % (turn % 16)})[0], 200)
            places = [{h["x-session-id"] for _, h in backend.requests} for backend in (one, two)]
            self.assertEqual(len(one.requests) + len(two.requests), 48)
            self.assertEqual(places[0] & places[1], set(), "a session moved")
            self.assertTrue(places[0] and places[1], "all sessions went to one server")
        finally:
            proxy.close()
            one.close()
            two.close()

    def test_large_body_and_errors_pass(self):
        status, text = ask(self.proxy.port, json.dumps({"model": "fake", "prompt": "x " * 500000, "max_tokens": 1}))
        self.assertIn(status, (200, 400), text[:200])
        self.assertNotIn("nginx", text)
        self.assertEqual(ask(self.proxy.port, '{"model":')[0], 400)
        self.assertEqual(ask(self.proxy.port, path="/nowhere")[0], 404)

    def test_inner_routes_are_closed(self):
        for method, path in (("GET", "/metrics"), ("POST", "/admin/replicas/0/restart")):
            before = sum(s.metric("quire:http_requests_total") for s in self.servers)
            connection = http.client.HTTPConnection("127.0.0.1", self.proxy.port, timeout=10)
            connection.request(method, path)
            self.assertEqual(connection.getresponse().status, 404, path)
            connection.close()
            self.assertLess(before, sum(s.metric('quire:http_requests_total') for s in self.servers) + 1)

    def test_a_dead_server_is_left_out_and_comes_back(self):
        victim = self.servers[1]
        victim.signal(signal.SIGKILL)
        victim.process.wait()
        self.addCleanup(self.again, 1)
        slow = []
        for _ in range(20):
            begun = time.monotonic()
            self.assertEqual(ask(self.proxy.port)[0], 200)
            slow.append(time.monotonic() - begun)
        self.assertLess(max(slow), 3)

    def again(self, index):
        """A server in the place and on the port of one that ended, used again by the proxy."""
        port = self.servers[index].port
        self.servers[index].__exit__()
        self.servers[index] = self.start(port)
        self.servers[index].until(
            lambda: ask(self.proxy.port)[0] == 200 and self.servers[index].metric("quire:requests_submitted_total"), 8
        )

    def test_drain(self):
        """What runs on a server told to end ends there through the proxy; the other one takes what still comes."""
        victim = self.servers[0]
        self.addCleanup(self.again, 0)
        streams = [begin(self.proxy.port, 60) for _ in range(4)]
        victim.signal(signal.SIGTERM)
        victim.wait_line("shutting down")
        time.sleep(0.02)  # a connection that was opened in this moment is closed unused
        statuses = [ask(self.proxy.port)[0] for _ in range(15)]
        self.assertLessEqual(set(statuses), self.WHILE_DRAINING, self.proxy.said())
        self.assertIn(200, statuses)
        for sock, data in streams:
            while b"[DONE]" not in data:
                piece = sock.recv(65536)
                self.assertTrue(piece, "a stream was cut")
                data += piece
            sock.close()
        self.assertEqual(victim.process.wait(10), 0)

    def test_the_real_server(self):
        model = default_model()
        if not model or not os.path.exists(REAL):
            self.skipTest("skipped: the default model or build/quire is not here")
        with Server("--threads", "1", model=model) as one, Server("--threads", "1", model=model) as two:
            proxy = Proxy(self.KIND, [one.port, two.port])
            try:
                body = '{"model":"default","prompt":"The capital of France is","max_tokens":12,"temperature":0}'
                direct = json.loads(ask(one.port, body)[1])["choices"][0]["text"]
                for _ in range(2):
                    self.assertEqual(json.loads(ask(proxy.port, body)[1])["choices"][0]["text"], direct)
                sock = socket.create_connection(("127.0.0.1", proxy.port), 60)
                sock.sendall(post("/v1/completions", body.replace('"temperature"', '"stream":true,"temperature"')))
                events = [e for e in read_reply(sock).body.decode().split("\n\n") if e and "[DONE]" not in e]
                texts = [json.loads(e[5:])["choices"][0]["text"] for e in events]
                self.assertEqual("".join(texts), direct)
                self.assertGreater(len(texts), 4)
                sock.close()
            finally:
                proxy.close()

    def test_what_is_sent_on(self):
        one, two = Recorder(), Recorder()
        proxy = Proxy(self.KIND, [one.port, two.port])
        try:
            time.sleep(0.3)  # until the first checks passed
            headers = {"X-Forwarded-Proto": "gopher", "Host": "chat.example"}
            client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
            for _ in range(12):
                client.request("POST", "/v1/completions", SHORT, headers)
                self.assertEqual(client.getresponse().read(), b"ok")
            client.close()
            seen = one.requests + two.requests
            self.assertEqual(len(seen), 12)
            for line, headers in seen:
                self.assertTrue(line.endswith("HTTP/1.1"), line)
                self.assertEqual(headers.get("x-forwarded-proto"), "http", "what a client says of itself is believed")
                self.assertEqual(headers.get("x-forwarded-for"), "127.0.0.1")
                self.assertEqual(headers.get("x-forwarded-host"), "chat.example")
                self.assertNotEqual(headers.get("connection", "").lower(), "close")
            self.assertLessEqual(one.connections + two.connections, 4, "a connection is not used again")
            one.hang_up = two.hang_up = True
            before = len(one.requests) + len(two.requests)
            self.assertIn(ask(proxy.port)[0], (502, 503, 504))
            time.sleep(0.2)
            self.assertEqual(len(one.requests) + len(two.requests) - before, 1, "a POST that was read went out again")
        finally:
            proxy.close()
            one.close()
            two.close()


class HAProxy(Both, unittest.TestCase):
    KIND = "haproxy"
    WHILE_DRAINING = {200}  # a 503 goes on to the other server, then health says it


class Nginx(Both, unittest.TestCase):
    KIND = "nginx"
    WHILE_DRAINING = {200, 503}


if __name__ == "__main__":
    unittest.main()
