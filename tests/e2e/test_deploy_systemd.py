"""deploy/systemd: the unit holds before systemd-analyze, its environment is one that the server takes, and the server
works under the limits it sets. What systemd hears of the server: test_deploy_notify.py."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from http_support import REAL, ROOT, Server, default_model  # noqa: E402

UNIT = os.path.join(ROOT, "deploy/systemd/quire@.service")
LAYOUTS = ("replicas", "tensor-parallel")


def unit_lines():
    with open(UNIT) as f:
        return [line.strip() for line in f if line.strip() and line[0] not in "#["]


def values(key):
    return [line.split("=", 1)[1] for line in unit_lines() if line.startswith(key + "=")]


def env_file(layout):
    with open(os.path.join(ROOT, "deploy/systemd", layout + ".env")) as f:
        return dict(line.strip().split("=", 1) for line in f if line.strip() and line[0] != "#")


def unit_environment():
    return dict(pair.split("=", 1) for value in values("Environment") for pair in value.split())


class Analyze(unittest.TestCase):
    def setUp(self):
        if not shutil.which("systemd-analyze"):
            self.skipTest("skipped: no systemd-analyze here")
        if not os.path.exists(REAL):
            self.skipTest("skipped: build/quire is not here")

    def analyze(self, text, *arguments):
        """Of an instance of the unit with the binary where it is here."""
        with tempfile.TemporaryDirectory(prefix="quire-unit-") as folder:
            path = os.path.join(folder, "quire@replicas.service")
            with open(path, "w") as f:
                f.write(text.replace("ExecStart=/usr/local/bin/quire", "ExecStart=" + REAL))
            done = subprocess.run(["systemd-analyze", *arguments, path], capture_output=True, text=True, timeout=60)
            return done.returncode, done.stdout + done.stderr

    def text(self):
        with open(UNIT) as f:
            return f.read()

    def test_verify(self):
        self.assertEqual(self.analyze(self.text(), "verify"), (0, ""))

    def test_verify_would_tell(self):
        self.assertIn("ProtectClok", self.analyze(self.text().replace("ProtectClock", "ProtectClok"), "verify")[1])

    def test_exposure(self):
        """systemd's own judgement from 0 (safe) to 10; 1.9 when this was written, GPUs and the network being open."""
        code, said = self.analyze(self.text(), "security", "--offline=true", "--threshold=25")
        self.assertEqual(code, 0, said)


class Environment(unittest.TestCase):
    def test_names_are_known(self):
        if not os.path.exists(REAL):
            self.skipTest("skipped: build/quire is not here")
        known = subprocess.run([REAL, "serve", "--help"], capture_output=True, text=True).stdout
        for given in [unit_environment(), *map(env_file, LAYOUTS)]:
            for name in given:
                if name.startswith("QUIRE_"):
                    self.assertRegex(known, r"(?m)^ +%s$" % name)

    def test_layouts(self):
        sizes = [[env_file(l).get("QUIRE_%s_PARALLEL_SIZE" % k) for k in ("DATA", "TENSOR")] for l in LAYOUTS]
        self.assertEqual(sizes, [["2", None], [None, "2"]])

    def test_times_fit(self):
        """Streams may end before systemd loses its patience, and the watchdog has more of it than a step."""
        shutdown = int(unit_environment()["QUIRE_SHUTDOWN_TIMEOUT"])
        self.assertGreaterEqual(int(values("TimeoutStopSec")[0]), shutdown + 10)
        self.assertGreater(int(values("WatchdogSec")[0]), 20)
        self.assertEqual(values("Type"), ["notify"])
        self.assertEqual(values("KillMode"), ["mixed"])


class Confined(unittest.TestCase):
    """The real server, read-only but for /dev/shm, with the unit's list of system calls and no writable code."""

    def confined(self, *command):
        return ["unshare", "-rm", sys.executable, os.path.join(ROOT, "tests/e2e/confine.py"), *command]

    def setUp(self):
        if not default_model() or not os.path.exists(REAL):
            self.skipTest("skipped: the default model or build/quire is not here")
        probe = subprocess.run(self.confined("true"), capture_output=True, text=True)
        if probe.returncode:
            self.skipTest(probe.stderr.strip() if probe.returncode == 77 else "skipped: " + probe.stderr.strip())

    def test_it_confines(self):
        """A read-only tree (30), no writable code (13), no call outside the list (1)."""
        script = (
            "import ctypes, mmap, os\n"
            "open('/dev/shm/x', 'w').close()\n"
            "try: os.mkdir('/tmp/quire-must-not-be')\n"
            "except OSError as e: print(e.errno)\n"
            "try: mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC)\n"
            "except OSError as e: print(e.errno)\n"
            "libc = ctypes.CDLL(None, use_errno=True)\n"
            "libc.ptrace(0, 0, 0, 0)\n"
            "print(ctypes.get_errno())\n"
        )
        done = subprocess.run(self.confined(sys.executable, "-c", script), capture_output=True, text=True)
        self.assertEqual(done.stdout.split(), ["30", "13", "1"], done.stderr)

    def serves(self, layout):
        given = {k: v for k, v in unit_environment().items() if "%" not in v and "/" not in v}
        given.update(layout)
        body = {"model": "default", "prompt": "One, two, three,", "max_tokens": 6, "temperature": 0}
        with Server("--threads", "1", env=given, model=default_model(), launcher=self.confined()) as server:
            reply = server.post("/v1/completions", json.dumps(body))
            self.assertEqual(reply.status, 200, reply.body)
            self.assertIn("four", json.loads(reply.body)["choices"][0]["text"])
            server.signal()
            self.assertEqual(server.process.wait(20), 0)

    def test_serves(self):
        """In each file's layout, on the CPU; the default model has nine heads: three ranks share them, two cannot."""
        given = [{**env_file(layout), "QUIRE_DEVICE": "cpu"} for layout in LAYOUTS]
        self.assertEqual(given[1]["QUIRE_TENSOR_PARALLEL_SIZE"], "2")
        given[1]["QUIRE_TENSOR_PARALLEL_SIZE"] = "3"
        for one in given:
            del one["QUIRE_MODEL"], one["QUIRE_HOST"], one["QUIRE_PORT"]
            self.serves(one)


if __name__ == "__main__":
    unittest.main()
