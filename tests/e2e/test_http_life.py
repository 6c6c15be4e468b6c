"""Starting, ending and dying: probes that tell the truth, signals, exit codes."""

import os
import re
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from http_support import FAKE, Server, closed, post, read_reply  # noqa: E402

STREAM = '{"model":"fake","prompt":"hi","max_tokens":%d,"stream":true}'


def begin_stream(server, tokens):
    sock = server.connect(30)
    sock.sendall(post("/v1/completions", STREAM % tokens))
    data = b""
    while b"data:" not in data:
        data += sock.recv(4096)
    return sock, data


class Life(unittest.TestCase):
    def test_loading(self):
        with Server(env={"QUIRE_FAKE_LOAD_MS": "1200"}, wait=False) as server:
            self.assertEqual(server.get("/health/live").status, 200)
            for path in ("/health", "/health/ready", "/health/startup", "/ping"):
                self.assertEqual(server.get(path).status, 503, path)
            reply = server.post("/generate", '{"prompt":"hi"}')
            self.assertEqual(reply.status, 503)
            self.assertIn("retry-after", reply.headers)
            self.assertEqual(server.metric("quire:ready"), 0)
            server.wait_line('msg="ready"')
            for path in ("/health", "/health/live", "/health/ready", "/health/startup"):
                self.assertEqual(server.get(path).status, 200, path)
            self.assertEqual(server.metric("quire:ready"), 1)

    def test_signal_while_loading(self):
        with Server(env={"QUIRE_FAKE_LOAD_MS": "5000"}, wait=False) as server:
            begun = time.monotonic()
            server.signal()
            self.assertEqual(server.process.wait(5), 0)
            self.assertLess(time.monotonic() - begun, 1)

    def test_drain(self):
        with Server("--shutdown-timeout", "20", env={"QUIRE_FAKE_STEP_US": "5000"}) as server:
            idle = server.connect()
            idle.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n")
            read_reply(idle)
            streams = [begin_stream(server, 200) for _ in range(8)]
            server.signal()
            server.wait_line("shutting down")
            self.assertEqual(server.get("/health/ready").status, 503)
            self.assertEqual(server.get("/health").status, 503)
            self.assertEqual(server.get("/health/live").status, 200)
            reply = server.post("/generate", '{"prompt":"hi"}')
            self.assertEqual(reply.status, 503)
            self.assertIn("retry-after", reply.headers)
            self.assertEqual(reply.headers["connection"], "close")
            self.assertTrue(closed(idle, 2))
            idle.close()
            for sock, data in streams:
                reply = read_reply(sock, data)
                self.assertTrue(reply.body.endswith(b"data: [DONE]\n\n"))
                self.assertIn(b'"finish_reason":"length"', reply.body)
                sock.close()
            self.assertEqual(server.process.wait(5), 0)

    def test_drain_limit(self):
        with Server("--shutdown-timeout", "1", env={"QUIRE_FAKE_STEP_US": "5000"}) as server:
            sock, data = begin_stream(server, 8000)
            begun = time.monotonic()
            server.signal(signal.SIGINT)
            reply = read_reply(sock, data)
            self.assertGreater(time.monotonic() - begun, 0.8)
            self.assertRegex(reply.body.decode(), r'"finish_reason":"\w+"|"error"')
            sock.close()
            self.assertEqual(server.process.wait(5), 0)
            self.assertLess(time.monotonic() - begun, 4)

    def test_second_signal(self):
        with Server("--shutdown-timeout", "60", env={"QUIRE_FAKE_STEP_US": "5000"}) as server:
            sock, data = begin_stream(server, 8000)
            server.signal()
            server.wait_line("shutting down")
            begun = time.monotonic()
            server.signal()
            reply = read_reply(sock, data)
            self.assertRegex(reply.body.decode(), r'"finish_reason":"\w+"|"error"')
            self.assertTrue(reply.body.endswith(b"data: [DONE]\n\n"))
            self.assertTrue(closed(sock))
            sock.close()
            self.assertEqual(server.process.wait(5), 0)
            self.assertLess(time.monotonic() - begun, 1)
            self.assertIn("requests_cut=1", server.wait_line("stopped"))

    def test_third_signal(self):
        """A reader that takes nothing cannot keep the server from ending."""
        with Server("--shutdown-timeout", "60", env={"QUIRE_FAKE_STEP_US": "5000"}) as server:
            sock, _ = begin_stream(server, 8000)
            for line in ("shutting down", "second signal"):
                server.signal()
                server.wait_line(line)
            begun = time.monotonic()
            server.signal()
            self.assertEqual(server.process.wait(5), 0)
            self.assertLess(time.monotonic() - begun, 1)
            sock.close()

    def test_idle_signal_is_quick(self):
        with Server() as server:
            begun = time.monotonic()
            server.signal()
            self.assertEqual(server.process.wait(5), 0)
            self.assertLess(time.monotonic() - begun, 1)

    def test_engine_dies(self):
        """A fault ends the engine and its streams; the server starts another one."""
        with Server(env={"QUIRE_FAKE_STEP_US": "5000", "QUIRE_FAKE_DIE_AFTER": "50"}) as server:
            sock, data = begin_stream(server, 8000)
            reply = read_reply(sock, data)
            self.assertIn(b"error", reply.body)
            sock.close()
            self.assertIn("told to die", server.wait_line("the engine died"))
            server.until(lambda: server.get("/health/ready").status == 200)
            self.assertEqual(server.post("/generate", '{"prompt":"hi","max_tokens":3}').status, 200)
            self.assertEqual(server.metric("quire:replica_deaths_total"), 1)
            server.signal()
            self.assertEqual(server.process.wait(5), 0)

    def test_no_heartbeat(self):
        """Its engine is taken for dead and replaced; the front lives."""
        with Server(env={"QUIRE_FAKE_STALL": "2"}) as server:
            server.until(lambda: server.get("/health").status == 503, 4)
            self.assertEqual(server.get("/health/live").status, 200)
            self.assertIn("heartbeat", server.wait_line("the engine died"))
            server.wait_line('msg="engine up" replica=0', 5)

    def test_request_log(self):
        with Server("--enable-log-requests") as server:
            server.post("/generate", '{"prompt":"a very secret prompt","max_tokens":2}')
            line = server.wait_line('msg="request"')
            self.assertRegex(
                line,
                r'method=POST path="/generate" status=200 bytes=\d+ ms=[\d.]+ ' r"prompt_tokens=20 output_tokens=2$",
            )
            server.get("/a%0db%20c")
            server.get("/a%22%20msg=b")
            server.wait_line(r"msg=b")
            self.assertNotIn("secret", "".join(server.lines))


class Command(unittest.TestCase):
    def run_fake(self, *arguments, env=None):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
        environment.update(env or {})
        return subprocess.run([FAKE, *arguments], capture_output=True, text=True, timeout=20, env=environment)

    def test_usage(self):
        out = self.run_fake("serve", "--help")
        self.assertEqual(out.returncode, 0)
        self.assertIn("--max-num-seqs", out.stdout)
        self.assertIn("QUIRE_MAX_NUM_SEQS", out.stdout)
        out = self.run_fake("--version")
        self.assertEqual((out.returncode, out.stdout.split()[0]), (0, "quire"))
        for arguments, text in (
            (("serve", "--prot", "1"), "did you mean --port?"),
            (("serve", "--port", "99999"), "from 0 to 65535"),
            (("serve", "/nonexistent/model.gguf"), "no file or folder"),
            (("serve", "nobody/nothing"), "hf download nobody/nothing"),
            (("serve", FAKE, "--dtype", "float16"), "float32"),
            (("serve", FAKE, "--device", "cpu", "--dtype", "bfloat16"), "float32 on the CPU"),
            (("serve", FAKE, "--device", "cuda", "--dtype", "float32"), "bfloat16 on CUDA"),
            (("serve", FAKE, "--kv-cache-dtype", "fp8"), "bf16 on CUDA, not fp8"),
            (("serve", FAKE, "--load-format", "safetensors"), "--load-format safetensors takes a folder"),
            (("serve", FAKE, "--device", "cpu", "--kv-cache-dtype", "bf16"), "f16 or f32 on the CPU"),
            (("serve", FAKE, "--device", "cuda:0", "--kv-cache-dtype", "f16"), "bf16 on CUDA"),
            (("serve", FAKE, "--chat-template", "/nonexistent"), "cannot read"),
            (("serve", FAKE, "--host", "example.org"), "IP address"),
            (("bake",), "no command"),
            ((), "quire serve"),
        ):
            out = self.run_fake(*arguments)
            self.assertEqual(out.returncode, 2, arguments)
            self.assertIn(text, out.stderr)
            if arguments:
                said = [line for line in out.stderr.splitlines() if not re.match(r"time=", line)]
                self.assertEqual(len(said), 1, out.stderr)

    def test_default_model_absent(self):
        out = self.run_fake("serve", env={"XDG_CACHE_HOME": "/nonexistent"})
        self.assertEqual(out.returncode, 2)
        self.assertIn("./deploy/quickstart --no-serve", out.stderr)

    def test_port_in_use(self):
        with Server() as server:
            out = self.run_fake("serve", server.model.name, "--port", str(server.port))
            self.assertEqual(out.returncode, 1)
            self.assertEqual(len(out.stderr.splitlines()), 1, out.stderr)
            self.assertIn("is in use", out.stderr)


if __name__ == "__main__":
    unittest.main()
