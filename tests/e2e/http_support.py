"""Starting quire_fake (the server before a fake engine) and speaking to it over raw sockets. Standard library only."""

import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FAKE = os.path.join(os.environ.get("QUIRE_BUILD", os.path.join(ROOT, "build")), "quire_fake")
REAL = os.environ.get("QUIRE_BINARY", os.path.join(ROOT, "build", "quire"))


def default_model():
    """The default model's file, None where it was not fetched."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = os.environ.get("QUIRE_TEST_MODEL") or os.path.join(cache, "quire", "SmolLM2-135M-Instruct.Q4_1.gguf")
    return path if os.path.exists(path) else None


def device_flags():
    """QUIRE_TEST_DEVICE names the device that tests of the real binary run on; without it a GPU where there is one. The
    same request gives the same bits among others there only with --batch-invariant, and these tests compare."""
    device = os.environ.get("QUIRE_TEST_DEVICE")
    return ["--batch-invariant"] + (["--device", device] if device else [])


class Server:
    """A running quire_fake, or with `model` the real binary, on a free port; a context manager that ends it.
    `launcher` is a command that runs the program."""

    def __init__(self, *flags, env=None, wait=True, limit_files=None, model=None, launcher=()):
        self.model = tempfile.NamedTemporaryFile(prefix="fake-model-", suffix=".gguf")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_") and k != "VLLM_API_KEY"}
        environment.update(env or {})
        command = [
            *launcher,
            REAL if model else FAKE,
            "serve",
            model or self.model.name,
            "--port",
            "0",
            "--served-model-name",
            "default" if model else "fake",
            *(device_flags() if model else []),
            *flags,
        ]
        if limit_files:
            command = ["prlimit", "--nofile=%d:%d" % (limit_files, limit_files), *command]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True)
        self.timeout = 300 if model else 10  # a real model on a busy machine takes its time
        self.lines = []
        self.seen = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        self.port = int(re.search(r"address=\S+:(\d+)", self.wait_line("listening")).group(1))
        if wait:
            self.wait_line('msg="ready"')

    def _read(self):
        for line in self.process.stderr:
            with self.seen:
                self.lines.append(line)
                self.seen.notify_all()

    def wait_line(self, text, seconds=20):
        end = time.monotonic() + seconds
        with self.seen:
            while True:
                for line in self.lines:
                    if text in line:
                        return line
                left = end - time.monotonic()
                if left <= 0:
                    raise AssertionError("no %r in the log:\n%s" % (text, "".join(self.lines)))
                self.seen.wait(left)

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stderr.close()

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def connect(self, timeout=None):
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=timeout or self.timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def get(self, path, headers=""):
        with self.connect() as sock:
            sock.sendall(("GET %s HTTP/1.1\r\nHost: t\r\n%s\r\n" % (path, headers)).encode())
            return read_reply(sock)

    def post(self, path, body, headers=""):
        with self.connect() as sock:
            sock.sendall(post(path, body, headers))
            return read_reply(sock)

    def metric(self, series):
        """Sum of the values of the lines that begin with `series`."""
        text = self.get("/metrics").body.decode()
        return sum(float(l.rsplit(" ", 1)[1]) for l in text.splitlines() if l.startswith(series))

    def resident_kib(self):
        with open("/proc/%d/status" % self.process.pid) as f:
            return int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1))

    def cpu_seconds(self):
        with open("/proc/%d/stat" % self.process.pid) as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def until(self, condition, seconds=5):
        """Waits until condition() holds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if condition():
                    return
            except ConnectionError:
                pass
            time.sleep(0.02)
        raise AssertionError("it did not come to be within %s s" % seconds)


class Reply:
    def __init__(self, status, headers, body, rest):
        self.status, self.headers, self.body, self.rest = status, headers, body, rest


def post(path, body, headers=""):
    if isinstance(body, str):
        body = body.encode()
    head = "POST %s HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n" % path
    head += "Content-Length: %d\r\n%s\r\n" % (len(body), headers)
    return head.encode() + body


def _more(sock, data):
    piece = sock.recv(65536)
    if not piece:
        raise AssertionError("the server closed in the middle of: %r" % data[:200])
    return data + piece


def read_reply(sock, data=b"", no_body=False):
    """Reads one whole reply; what came behind it is reply.rest."""
    while b"\r\n\r\n" not in data:
        data = _more(sock, data)
    head, data = data.split(b"\r\n\r\n", 1)
    lines = head.decode().split("\r\n")
    headers = {k.lower(): v.strip() for k, v in (l.split(":", 1) for l in lines[1:])}
    status = int(lines[0].split()[1])
    if no_body or status == 100:
        return Reply(status, headers, b"", data)
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while True:
            while b"\r\n" not in data:
                data = _more(sock, data)
            size, data = data.split(b"\r\n", 1)
            size = int(size, 16)
            while len(data) < size + 2:
                data = _more(sock, data)
            assert data[size : size + 2] == b"\r\n"
            body, data = body + data[:size], data[size + 2 :]
            if size == 0:
                break
    elif "content-length" in headers:
        length = int(headers["content-length"])
        while len(data) < length:
            data = _more(sock, data)
        body, data = data[:length], data[length:]
    else:
        while True:
            piece = sock.recv(65536)
            if not piece:
                break
            data += piece
        body, data = data, b""
    return Reply(status, headers, body, data)


def closed(sock, seconds=5):
    """True when the server closes the connection."""
    sock.settimeout(seconds)
    try:
        while sock.recv(65536):
            pass
        return True
    except ConnectionError:
        return True
    except socket.timeout:
        return False
