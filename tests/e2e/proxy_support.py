"""HAProxy and nginx with the configurations of deploy/proxy, and a backend that writes down what it is sent."""

import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time

from http_support import ROOT

CACHE = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "quire", "tests-proxies")


def find(program):
    """The program's path; None where it is neither installed nor was unpacked by tests/run."""
    unpacked = os.path.join(CACHE, "usr/sbin", program)
    return unpacked if os.path.exists(unpacked) else shutil.which(program, path="/usr/sbin:/usr/bin:/usr/local/sbin")


def environment(program):
    """Unpacked programs have their libraries beside them."""
    out = dict(os.environ)
    if program.startswith(CACHE):
        found = {os.path.dirname(os.path.join(at, n)) for at, _, names in os.walk(CACHE) for n in names if ".so" in n}
        out["LD_LIBRARY_PATH"] = ":".join(sorted(found))
    return out


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Proxy:
    """One of the two in front of two ports."""

    def __init__(self, kind, ports):
        self.kind, self.program = kind, find(kind)
        self.folder = tempfile.TemporaryDirectory(prefix="quire-proxy-")
        self.log = open(os.path.join(self.folder.name, "log"), "w+")
        for _ in range(5):  # the port was free a moment ago
            self.port = free_port()
            command, more = self.haproxy(ports) if kind == "haproxy" else self.nginx(ports)
            self.process = subprocess.Popen(
                command, env={**environment(self.program), **more}, stdout=self.log, stderr=self.log
            )
            if self.listens():
                return
            self.close_process()
        said = self.said()
        self.close()
        raise AssertionError("%s does not start:\n%s" % (kind, said))

    def said(self):
        with open(self.log.name) as f:
            return f.read()

    def haproxy(self, ports):
        more = {"QUIRE_BIND": "127.0.0.1:%d" % self.port}
        more.update(zip(("QUIRE_A", "QUIRE_B"), ("127.0.0.1:%d" % p for p in ports)))
        return [self.program, "-db", "-f", os.path.join(ROOT, "deploy/proxy/haproxy.cfg")], more

    def nginx(self, ports):
        """The file as it is but for its addresses, inside the least of an nginx.conf."""
        with open(os.path.join(ROOT, "deploy/proxy/nginx.conf")) as f:
            text = f.read()
        for old, new in zip(("127.0.0.1:8001", "127.0.0.1:8002"), ("127.0.0.1:%d" % p for p in ports)):
            assert text.count(old) == 2, "both upstreams name " + old
            text = text.replace(old, new)
        text, count = re.subn(r"listen 8080;", "listen 127.0.0.1:%d;" % self.port, text)
        assert count == 1
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        paths = "".join("%s_temp_path %s/%s;\n" % (k, self.folder.name, k) for k in kinds)
        user = "user root; " if os.geteuid() == 0 else ""  # the folder is this user's
        head = "daemon off; worker_processes 1; pid %s/pid; error_log stderr warn;\n"
        head += "events { worker_connections 1024; }\n"
        outer = os.path.join(self.folder.name, "nginx.conf")
        with open(outer, "w") as f:
            f.write(user + head % self.folder.name + "http {\naccess_log off;\n" + paths + text + "}\n")
        return [self.program, "-c", outer, "-p", self.folder.name], {}

    def listens(self):
        end = time.monotonic() + 5
        while time.monotonic() < end and self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return True
            except OSError:
                time.sleep(0.02)
        return False

    def close_process(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()

    def close(self):
        self.close_process()
        self.log.close()
        self.folder.cleanup()


class Recorder:
    """A backend that keeps the requests it read. It answers health; a POST it answers, or hangs up on when told to."""

    def __init__(self, port=0):
        self.listener = socket.create_server(("127.0.0.1", port), backlog=64)
        self.port = self.listener.getsockname()[1]
        self.requests, self.connections, self.hang_up = [], 0, False
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(sock,), daemon=True).start()

    @staticmethod
    def read(sock):
        try:
            return sock.recv(65536)
        except ConnectionError:  # how a proxy ends a check
            return b""

    def serve(self, sock):
        data, counted = b"", False
        with sock:
            while True:
                while b"\r\n\r\n" not in data:
                    piece = self.read(sock)
                    if not piece:
                        return
                    data += piece
                head, data = data.split(b"\r\n\r\n", 1)
                lines = head.decode().split("\r\n")
                headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines[1:])}
                while len(data) < int(headers.get("content-length", 0)):
                    data += sock.recv(65536)
                data = data[int(headers.get("content-length", 0)) :]
                if "/health" not in lines[0]:
                    self.connections += not counted
                    counted = True
                    self.requests.append((lines[0], headers))
                    if self.hang_up:
                        return
                sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
