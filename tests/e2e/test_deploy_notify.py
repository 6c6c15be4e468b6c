"""What a service manager sees of `quire serve`: this plays systemd's side of Type=notify and WatchdogSec, and that of a
container's kernel, where the server is process 1."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from http_support import FAKE, REAL, Server, default_model, post  # noqa: E402


class Manager:
    """A notification socket: a path, or an abstract name."""

    def __init__(self, abstract=False):
        self.folder = tempfile.TemporaryDirectory(prefix="quire-notify-")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.name = "@quire-notify-%d-%d" % (os.getpid(), id(self)) if abstract else self.folder.name + "/notify"
        self.socket.bind("\0" + self.name[1:] if abstract else self.name)
        self.seen = []

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.socket.close()
        self.folder.cleanup()

    def environment(self, watchdog_us=None, **more):
        out = {"NOTIFY_SOCKET": self.name, **more}
        if watchdog_us:
            out["WATCHDOG_USEC"] = str(watchdog_us)
        return out

    def next(self, seconds):
        """The next message and when it came; None when there was none."""
        self.socket.settimeout(max(seconds, 0.001))
        try:
            message = self.socket.recv(4096).decode()
        except socket.timeout:
            return None
        self.seen.append(message)
        return message, time.monotonic()

    def wait(self, text, seconds=20):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = self.next(end - time.monotonic())
            if found and text in found[0]:
                return found
        raise AssertionError("no %r within %s s, only %r" % (text, seconds, self.seen))

    def count(self, text, seconds):
        end, found = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            message = self.next(end - time.monotonic())
            found += bool(message and text in message[0])
        return found

    def drain(self):
        while self.next(0):
            pass


class Notify(unittest.TestCase):
    def life(self, manager, server):
        """From loading to the end, as it is told."""
        manager.wait("STATUS=loading")
        manager.wait("READY=1")
        self.assertEqual(server.get("/health/ready").status, 200, "ready was said before it was so")
        self.assertEqual(manager.seen.count("READY=1"), 1)
        begun = manager.wait("WATCHDOG=1")[1]
        at = [manager.wait("WATCHDOG=1")[1] for _ in range(4)]
        self.assertLess((at[-1] - begun) / 4, 0.29, "not at half of WATCHDOG_USEC")
        self.assertGreater((at[-1] - begun) / 4, 0.15)
        server.signal(signal.SIGTERM)
        manager.wait("STOPPING=1", 2)
        self.assertEqual(server.process.wait(20), 0)

    def test_life_of_the_fake(self):
        with Manager() as manager:
            environment = manager.environment(400000, QUIRE_FAKE_LOAD_MS="300")
            with Server(env=environment, wait=False) as server:
                self.life(manager, server)

    def test_life_of_the_real(self):
        model = default_model()
        if not model or not os.path.exists(REAL):
            self.skipTest("skipped: the default model or build/quire is not here")
        with Manager(abstract=True) as manager:
            with Server(env=manager.environment(400000), wait=False, model=model) as server:
                self.life(manager, server)

    def test_no_ready_while_loading(self):
        with Manager() as manager:
            environment = manager.environment(100000, QUIRE_FAKE_LOAD_MS="60000")
            with Server(env=environment, wait=False) as server:
                self.assertEqual(manager.count("READY=1", 0.7) + manager.seen.count("WATCHDOG=1"), 0)
                server.signal(signal.SIGTERM)
                server.process.wait(5)

    def test_a_stopped_process_is_silent(self):
        with Manager() as manager:
            with Server(env=manager.environment(200000)) as server:
                manager.wait("WATCHDOG=1")
                server.signal(signal.SIGSTOP)
                time.sleep(0.2)
                manager.drain()
                self.assertEqual(manager.count("WATCHDOG=1", 1.0), 0)
                server.signal(signal.SIGCONT)
                manager.wait("WATCHDOG=1", 2)

    def test_a_dead_engine_is_not_silent(self):
        """The engine's heart does not beat: that is for the front to mend, which lives and says so."""
        with Manager() as manager:
            with Server(env=manager.environment(200000, QUIRE_FAKE_STALL="2")) as server:
                server.until(lambda: server.get("/health/ready").status == 503, 12)
                self.assertEqual(server.get("/health/live").status, 200)
                manager.drain()
                self.assertGreater(manager.count("WATCHDOG=1", 1.0), 2)

    def test_no_watchdog_asked_for(self):
        with Manager() as manager:
            with Server(env=manager.environment(WATCHDOG_USEC="200000", WATCHDOG_PID="1")) as server:
                manager.wait("READY=1")
                self.assertEqual(manager.count("WATCHDOG=1", 0.7), 0, "WATCHDOG_PID names another process")
                server.signal(signal.SIGTERM)
                server.process.wait(10)

    def test_bad_addresses(self):
        for name in ("relative/path", "@", "/" + "x" * 107, "/nobody/listens", "vsock:2:1234"):
            with Server(env={"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "100000"}) as server:
                server.wait_line("NOTIFY_SOCKET" if name != "/nobody/listens" else "cannot be told", 5)
                self.assertEqual(server.get("/health/ready").status, 200)
                server.signal(signal.SIGTERM)
                self.assertEqual(server.process.wait(10), 0, name)

    def test_bad_watchdog(self):
        for value in ("soon", "-1", "0", "1e300", "nan"):
            with Manager() as manager:
                with Server(env=manager.environment(WATCHDOG_USEC=value)) as server:
                    manager.wait("READY=1")
                    server.wait_line("watchdog", 5)
                    self.assertEqual(manager.count("WATCHDOG=1", 0.1), 0, value)

    def test_status(self):
        with Manager() as manager:
            with Server(env=manager.environment(QUIRE_FAKE_STEP_US="20000")) as server:
                manager.wait("STATUS=serves fake")
                with server.connect() as sock:
                    body = '{"model":"fake","prompt":"a","max_tokens":1000,"stream":true}'
                    sock.sendall(post("/v1/completions", body))
                    sock.recv(4096)
                    self.assertIn("fake: 1 running, 0 waiting", manager.wait("running", 15)[0])


class ProcessOne(unittest.TestCase):
    """In a PID namespace of its own, as a container has it and without an init before it."""

    def setUp(self):
        probe = subprocess.run(["unshare", "-r", "--pid", "--fork", "--mount-proc", "true"], capture_output=True)
        if probe.returncode:
            self.skipTest("skipped: no namespaces here: " + probe.stderr.decode().strip())

    def test_signals_and_orphans(self):
        with tempfile.NamedTemporaryFile(prefix="fake-model-", suffix=".gguf") as model, Manager() as manager:
            command = ["unshare", "-r", "--pid", "--fork", "--kill-child", "--mount-proc", FAKE, "serve", model.name]
            environment = {**os.environ, **manager.environment()}
            process = subprocess.Popen(command + ["--port", "0"], stderr=subprocess.DEVNULL, env=environment)
            try:
                manager.wait("READY=1")
                with open("/proc/%d/task/%d/children" % (process.pid, process.pid)) as f:
                    one = int(f.read().split()[0])
                orphan = "(sleep 0.1; exit 3) & exit 0"
                engines = self.children(one)
                enter = ["nsenter", "-t", str(one), "-U", "-p", "--preserve-credentials", "sh", "-c"]
                for _ in range(2):
                    subprocess.run([*enter, orphan], check=True)
                self.assertGreater(len(self.children(one)), len(engines), "an orphan becomes the server's child")
                end = time.monotonic() + 8
                while self.children(one) != engines and time.monotonic() < end:
                    time.sleep(0.05)
                self.assertEqual(self.children(one), engines, "zombies are left")
                os.kill(one, signal.SIGTERM)  # process 1 gets only the signals that it has a handler for
                manager.wait("STOPPING=1", 2)
                self.assertEqual(process.wait(10), 0)
            finally:
                process.kill()
                process.wait()

    @staticmethod
    def children(pid):
        with open("/proc/%d/task/%d/children" % (pid, pid)) as f:
            return f.read().split()


if __name__ == "__main__":
    unittest.main()
