"""A server for the tests of the API: the one at QUIRE_URL, else build/quire with the default model, else quire_fake."""

import http.client
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
import urllib.parse

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("QUIRE_BUILD", os.path.join(ROOT, "build"))
MODEL = os.environ.get("QUIRE_TEST_MODEL") or os.path.join(
    os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "quire", "SmolLM2-135M-Instruct.Q4_1.gguf"
)


class Server:
    """Started on demand, ended by close(). `fake` says that the answers are not a model's."""

    def __init__(self, fake=False, flags=(), env=None):
        self.process = self.file = None
        self.lines = []
        self.expected = 0  # exit code
        self.url = None if fake else os.environ.get("QUIRE_URL")
        self.fake = fake or not (self.url or os.path.exists(MODEL) and os.path.exists(os.path.join(BUILD, "quire")))
        if not self.url:
            self._start(list(flags), env or {})
        parts = urllib.parse.urlsplit(self.url)
        self.host, self.port = parts.hostname, parts.port
        self.model = self.get("/v1/models").json()["data"][0]["id"]

    def _start(self, flags, env):
        path = MODEL
        if self.fake:
            self.file = tempfile.NamedTemporaryFile(prefix="fake-model-", suffix=".gguf")
            path = self.file.name
        environment = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_") and k != "VLLM_API_KEY"}
        environment.update(env)
        command = [os.path.join(BUILD, "quire_fake" if self.fake else "quire"), "serve", path, "--port", "0", *flags]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, text=True
        )
        lines, ready = self.lines, threading.Event()

        def read():
            for line in self.process.stderr:
                lines.append(line)
                if 'msg="ready"' in line:
                    ready.set()
            ready.set()

        threading.Thread(target=read, daemon=True).start()
        ready.wait(60)
        found = re.search(r"address=\S+:(\d+)", "".join(lines))
        if self.process.poll() is not None or not found or 'msg="ready"' not in "".join(lines):
            self.process.kill()
            self.process.wait()
            raise AssertionError("the server did not start:\n" + "".join(lines))
        self.url = "http://127.0.0.1:" + found.group(1)

    def close(self):
        if self.process:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                try:
                    self.process.wait(20)
                except subprocess.TimeoutExpired:
                    self.process.kill()
                    self.process.wait()
            self.process.stderr.close()
        if self.file:
            self.file.close()
        if self.process and self.process.returncode != self.expected:  # a sanitizer's finding ends up here too
            raise AssertionError("the server ended with %d:\n%s" % (self.process.returncode, "".join(self.lines[-60:])))

    def request(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        data = body if body is None or isinstance(body, (bytes, str)) else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        reply = Reply(response.status, dict((k.lower(), v) for k, v in response.getheaders()), response.read())
        connection.close()
        return reply

    def get(self, path):
        return self.request("GET", path)

    def post(self, path, body, headers=None):
        return self.request("POST", path, body, headers)

    def metric(self, series):
        """Sum of the values of the lines that begin with `series`."""
        return sum(
            float(l.rsplit(" ", 1)[1]) for l in self.get("/metrics").body.decode().splitlines() if l.startswith(series)
        )

    def until(self, condition, seconds=10):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return
            time.sleep(0.02)
        raise AssertionError("it did not come to be within %s s" % seconds)


class Reply:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    def json(self):
        return json.loads(self.body.decode("utf-8"))  # strict: UTF-8 or an error

    def events(self):
        """The data of a server-sent event stream, [DONE] as the string."""
        out = []
        for block in self.body.decode("utf-8").split("\n\n"):
            if not block:
                continue
            if not block.startswith("data:"):
                raise AssertionError("not an event: %r" % block)
            data = block[5:].strip()
            out.append(data if data == "[DONE]" else json.loads(data))
        return out
