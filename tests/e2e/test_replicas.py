"""Engines that die, hang and are restarted behind one front: what clients see, how soon, and that nothing is left.
QUIRE_LONG=1: each fault 20 times instead of 3."""

import json
import os
import random
import re
import signal
import threading
import time
import unittest

from http_support import Server, default_model, post, read_reply

ROUNDS = 20 if os.environ.get("QUIRE_LONG") else 3
SLOW = float(os.environ.get("QUIRE_TEST_SLOW", "1"))  # a sanitizer's build: the bounds times this
RANKS = ("--device", "cpu", "--kv-cache-memory-bytes", "64M", "--tensor-parallel-size", "3")
KEY = "Authorization: Bearer secret\r\n"
STEP = {"QUIRE_FAKE_STEP_US": "5000"}


def body(tokens, stream=True, prompt="hi"):
    return json.dumps({"model": "fake", "prompt": prompt, "max_tokens": tokens, "stream": stream})


def replicas(server):
    return json.loads(server.get("/admin/replicas", KEY).body)["replicas"]


def children(pid):
    found = []
    try:
        for task in os.listdir("/proc/%d/task" % pid):
            with open("/proc/%d/task/%s/children" % (pid, task)) as file:
                found += [int(word) for word in file.read().split()]
    except FileNotFoundError:
        pass
    return found


def alive(pid):
    """Neither gone nor a zombie that only its parent's wait is missing for."""
    try:
        with open("/proc/%d/stat" % pid) as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, seconds, what):
    """The seconds it took."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise AssertionError("%s: not within %.1f s" % (what, seconds))
        time.sleep(0.005)
    return time.monotonic() - begun


def submitted(server, replica, model="fake"):
    return server.metric('quire:requests_submitted_total{model_name="%s",engine="%d"' % (model, replica))


def batches(most):
    """ROUNDS in parts: an engine that dies again and again is started after ever longer pauses, so that a server sees
    only some of them."""
    return [min(most, ROUNDS - at) for at in range(0, ROUNDS, most)]


def send(pid, number=signal.SIGKILL):
    assert pid > 0, "no process"
    os.kill(pid, number)


def open_files(pid):
    return len(os.listdir("/proc/%d/fd" % pid))


class Stream(threading.Thread):
    """A request that is read as it comes; `gap` is the longest time between two pieces."""

    def __init__(self, server, tokens, ask=None):
        super().__init__(daemon=True)
        self.sock = server.connect(60)
        self.data, self.gap, self.reply, self.failure, self.ended = b"", 0.0, None, None, None
        self.begun = threading.Event()
        self.sock.sendall(post("/v1/completions", ask or body(tokens), KEY))
        self.start()

    def run(self):
        last = time.monotonic()
        try:
            while not self.data.endswith(b"0\r\n\r\n"):
                piece = self.sock.recv(65536)
                now = time.monotonic()
                if b"data:" in self.data:
                    self.gap = max(self.gap, now - last)
                last = now
                if not piece:
                    raise AssertionError("closed in the middle")
                self.data += piece
                if b"data:" in self.data:
                    self.begun.set()
            self.reply = read_reply(self.sock, self.data)
        except Exception as fault:
            self.failure = fault
        self.ended = time.monotonic()
        self.begun.set()
        self.sock.close()

    def end(self):
        """b"whole" or b"error", or the fault that it ended with."""
        self.join(60)
        if self.failure or not self.reply:
            raise AssertionError("a stream did not end as it should: %r, %r" % (self.failure, self.data[-200:]))
        whole = b'"finish_reason":"length"' in self.reply.body
        error = b'"error"' in self.reply.body
        assert whole != error, self.reply.body[-300:]
        return "whole" if whole else "error"


class Base(unittest.TestCase):
    def server(self, count, *flags, env=None, **kinds):
        shm = set(os.listdir("/dev/shm"))
        server = Server("--data-parallel-size", str(count), "--api-key", "secret", *flags, env=env, **kinds)
        self.addCleanup(self.end, server, shm)
        return server

    def end(self, server, shm):
        """Ended as asked, and nothing of it is left."""
        pids = children(server.process.pid)
        if server.process.poll() is None:
            server.signal()
            self.assertEqual(server.process.wait(20), 0, "".join(server.lines[-20:]))
        server.__exit__()
        self.assertEqual([pid for pid in pids if alive(pid)], [])
        self.assertEqual(set(os.listdir("/dev/shm")) - shm, set())

    def all_up(self, server, count):
        return [r["state"] for r in replicas(server)] == ["up"] * count

    def wait_up(self, server, count, seconds):
        return wait_for(lambda: self.all_up(server, count), seconds * SLOW, "all engines up again")

    def wait_death(self, server, replica, deaths, seconds):
        return wait_for(lambda: replicas(server)[replica]["deaths"] > deaths, seconds * SLOW, "the death seen")


class Faults(Base):
    def test_kill_idle(self):
        for count in batches(8):
            server = self.server(2, env=STEP)
            files = open_files(server.process.pid)
            for i in range(count):
                victim = replicas(server)[i % 2]
                send(victim["pid"])
                self.wait_death(server, i % 2, victim["deaths"], 0.5)
                self.assertEqual(server.post("/v1/completions", body(3, False), KEY).status, 200)
                self.assertEqual(server.get("/health/ready").status, 200)
                self.wait_up(server, 2, 5)
                self.assertNotEqual(replicas(server)[i % 2]["pid"], victim["pid"])
            self.assertIn("signal 9", replicas(server)[0]["last_death"])
            deaths = 'quire:replica_deaths_total{model_name="fake",engine="0"}'
            self.assertEqual(server.metric(deaths), (count + 1) // 2)
            self.assertLessEqual(open_files(server.process.pid), files + 2)  # each engine has its own, as before

    def test_kill_streaming(self):
        """Half of the streams end with an error event, soon; the others go on as if nothing had happened."""
        for count in batches(8):
            server = self.server(2, "--routing-policy", "round-robin", env=STEP)
            for i in range(count):
                streams = [Stream(server, 400) for _ in range(8)]
                for stream in streams:
                    self.assertTrue(stream.begun.wait(10))
                victim = replicas(server)[i % 2]
                self.assertEqual(victim["requests"], 4)
                begun = time.monotonic()
                send(victim["pid"])
                ends = [stream.end() for stream in streams]
                self.assertEqual(sorted(ends), ["error"] * 4 + ["whole"] * 4)
                for stream, end in zip(streams, ends):
                    if end == "error":
                        self.assertLess(stream.ended - begun, 1 * SLOW)
                        self.assertTrue(stream.reply.body.endswith(b"data: [DONE]\n\n"))
                    else:
                        self.assertLess(stream.gap, 0.5 * SLOW)
                self.wait_up(server, 2, 5)
            self.assertEqual(server.metric("quire:replica_requests_failed_total"), 4 * count)

    def test_kill_not_streamed(self):
        """What nobody has seen a piece of is computed by the other engine."""
        for count in batches(8):
            server = self.server(2, "--routing-policy", "round-robin", env=STEP)
            for i in range(count):
                replies = []

                def ask():
                    replies.append(server.post("/v1/completions", body(100, False), KEY))

                threads = [threading.Thread(target=ask) for _ in range(6)]
                for thread in threads:
                    thread.start()
                wait_for(lambda: sum(r["requests"] for r in replicas(server)) == 6, 5, "six requests")
                send(replicas(server)[i % 2]["pid"])
                for thread in threads:
                    thread.join(30)
                self.assertEqual([r.status for r in replies], [200] * 6)
                texts = {json.loads(r.body)["choices"][0]["text"] for r in replies}
                self.assertEqual(len(texts), 1)
                self.wait_up(server, 2, 5)
            self.assertEqual(server.metric("quire:replica_requests_retried_total"), 3 * count)
            self.assertEqual(server.metric("quire:replica_requests_failed_total"), 0)

    def test_kill_the_only_one(self):
        """The front stays: 503 with Retry-After, health says so, and then it serves again."""
        for count in batches(4):
            server = self.server(1, env={**STEP, "QUIRE_FAKE_LOAD_MS": "300"})
            front = server.process.pid
            for _ in range(count):
                stream = Stream(server, 2000)
                self.assertTrue(stream.begun.wait(10))
                victim = replicas(server)[0]
                begun = time.monotonic()
                send(victim["pid"])
                self.assertEqual(stream.end(), "error")
                self.assertLess(stream.ended - begun, 1 * SLOW)
                reply = server.post("/v1/completions", body(3, False), KEY)
                self.assertEqual(reply.status, 503)
                self.assertIn("error", json.loads(reply.body))
                self.assertGreaterEqual(int(reply.headers["retry-after"]), 1)
                ready = server.get("/health/ready")
                self.assertEqual(ready.status, 503)
                self.assertEqual(json.loads(ready.body)["status"], "no engine is up")
                self.assertEqual(server.get("/health/live").status, 200)
                self.assertEqual(server.get("/health/startup").status, 200)
                self.wait_up(server, 1, 0.3 + 5)
                self.assertEqual(server.post("/v1/completions", body(3, False), KEY).status, 200)
            self.assertEqual(server.process.pid, front)
            self.assertEqual(server.metric("quire:ready"), 1)

    def test_kill_while_starting(self):
        for i in range(ROUNDS):
            server = self.server(2, env={"QUIRE_FAKE_LOAD_MS": "400"}, wait=False)
            wait_for(lambda: len(children(server.process.pid)) == 2, 5, "two engines")
            time.sleep(random.uniform(0, 0.3))
            send(children(server.process.pid)[i % 2])
            server.wait_line('msg="ready"')
            self.assertEqual(server.post("/v1/completions", body(3, False), KEY).status, 200)
            self.wait_up(server, 2, 0.4 + 5)
            self.assertEqual(sum(r["deaths"] for r in replicas(server)), 1)

    def test_stop_idle_and_busy(self):
        """A stopped engine has no heartbeat."""
        for count in batches(4):
            server = self.server(2, "--routing-policy", "round-robin", env=STEP)
            for i in range(count):
                streams = [Stream(server, 1000) for _ in range(2)] if i % 2 else []
                for stream in streams:
                    self.assertTrue(stream.begun.wait(10))
                victim = replicas(server)[0]
                begun = time.monotonic()
                send(victim["pid"], signal.SIGSTOP)
                self.wait_death(server, 0, victim["deaths"], 2.5)
                ends = [stream.end() for stream in streams]
                self.assertEqual(sorted(ends), ["error", "whole"] if streams else [])
                for stream, end in zip(streams, ends):
                    if end == "error":
                        self.assertLess(stream.ended - begun, 3.5 * SLOW)
                    else:
                        self.assertLess(stream.gap, 0.5 * SLOW)
                self.wait_up(server, 2, 5)
                self.assertFalse(alive(victim["pid"]))

    def test_step_timeout(self):
        server = self.server(1, "--step-timeout", "1", env={"QUIRE_FAKE_STALL": "1"})
        begun = time.monotonic()
        self.assertEqual(server.post("/v1/completions", body(10), KEY).status, 503)
        self.assertLess(time.monotonic() - begun, 3 * SLOW)
        self.assertIn("step", replicas(server)[0]["last_death"])

    def test_front_killed(self):
        for i in range(ROUNDS):
            with Server("--data-parallel-size", "2", env=STEP) as server:
                if i % 2:
                    Stream(server, 4000).begun.wait(10)
                pids = children(server.process.pid)
                self.assertEqual(len(pids), 2)
                server.signal(signal.SIGKILL)
                wait_for(lambda: not any(alive(pid) for pid in pids), 0.5 * SLOW, "the engines gone with their front")
                server.process.wait(5)

    def test_term_while_starting(self):
        for _ in range(2 * ROUNDS):
            flags = ("--data-parallel-size", "2")
            with Server(*flags, env={"QUIRE_FAKE_LOAD_MS": "300"}, wait=False) as server:
                time.sleep(random.uniform(0, 0.45))
                pids = children(server.process.pid)
                begun = time.monotonic()
                server.signal()
                self.assertEqual(server.process.wait(10), 0, "".join(server.lines))
                self.assertLess(time.monotonic() - begun, 1.5 * SLOW)
                self.assertEqual([pid for pid in pids if alive(pid)], [])

    @unittest.skipUnless(os.environ.get("QUIRE_LONG"), "skipped: half a minute of back-off (QUIRE_LONG=1)")
    def test_no_engine_starts_any_more(self):
        file = "/tmp/quire-fake-refuse-%d" % os.getpid()
        with Server("--data-parallel-size", "1", env={"QUIRE_FAKE_REFUSE": file}) as server:
            self.addCleanup(os.unlink, file)
            open(file, "w").close()
            send(children(server.process.pid)[0])
            self.assertEqual(server.process.wait(90), 3)
            said = [line for line in server.lines if not line.startswith("time=")]
            self.assertEqual(len(said), 1, said)
            self.assertIn("10 times in a row", said[0])


class Admin(Base):
    def test_restart_under_load(self):
        server = self.server(2, "--routing-policy", "round-robin", env=STEP)
        for i in range(ROUNDS):
            before = replicas(server)
            streams = [Stream(server, 150) for _ in range(6)]
            for stream in streams:
                self.assertTrue(stream.begun.wait(10))
            reply = server.post("/admin/replicas/%d/restart" % (i % 2), "", KEY)
            self.assertEqual(reply.status, 202, reply.body)
            self.assertEqual(json.loads(reply.body)["state"], "draining")
            self.assertEqual(server.post("/admin/replicas/%d/restart" % (i % 2), "", KEY).status, 409)
            later = [Stream(server, 20) for _ in range(6)]
            self.assertEqual([stream.end() for stream in streams + later], ["whole"] * 12)
            wait_for(lambda: replicas(server)[i % 2]["pid"] not in (0, before[i % 2]["pid"]), 5, "a new engine")
            self.wait_up(server, 2, 5)
            self.assertEqual(replicas(server)[1 - i % 2]["pid"], before[1 - i % 2]["pid"])
        self.assertEqual([r["deaths"] for r in replicas(server)], [0, 0])

    def test_restart_has_its_limit(self):
        server = self.server(1, "--shutdown-timeout", "1", env=STEP)
        before = replicas(server)[0]
        stream = Stream(server, 8000)
        self.assertTrue(stream.begun.wait(10))
        begun = time.monotonic()
        self.assertEqual(server.post("/admin/replicas/0/restart", "", KEY).status, 202)
        self.assertEqual(server.post("/v1/completions", body(3, False), KEY).status, 503)
        stream.join(10)
        self.assertLess(time.monotonic() - begun, 3 * SLOW)
        self.assertTrue(stream.reply.body.endswith(b"data: [DONE]\n\n"))
        wait_for(lambda: replicas(server)[0]["pid"] not in (0, before["pid"]), 5, "a new engine")
        self.wait_up(server, 1, 5)

    def test_who_may(self):
        server = self.server(1)
        self.assertEqual(server.get("/admin/replicas").status, 401)
        self.assertEqual(server.post("/admin/replicas/0/restart", "").status, 401)
        self.assertEqual(server.post("/admin/replicas/1/restart", "", KEY).status, 404)
        self.assertEqual(server.post("/admin/replicas/x/restart", "", KEY).status, 404)
        self.assertEqual(server.post("/admin/replicas/0/stop", "", KEY).status, 404)
        self.assertEqual(server.get("/admin/replicas/0/restart", KEY).status, 405)
        with Server() as open_to_all:
            reply = open_to_all.post("/admin/replicas/0/restart", "")
            self.assertEqual(reply.status, 403)
            self.assertIn("--api-key", json.loads(reply.body)["error"]["message"])
            self.assertEqual(open_to_all.get("/admin/replicas").status, 200)

    def test_seen(self):
        server = self.server(3, "--routing-policy", "round-robin")
        for _ in range(6):
            self.assertEqual(server.post("/v1/completions", body(5, False), KEY).status, 200)
        for i in range(3):
            server.until(lambda: submitted(server, i) == 2)
            up = 'quire:replica_state{model_name="fake",engine="%d",state="up"}' % i
            self.assertEqual(server.metric(up), 1)
        health = json.loads(server.get("/health").body)
        self.assertEqual([r["state"] for r in health["replicas"]], ["up"] * 3)
        self.assertEqual(sorted(r["pid"] for r in health["replicas"]), sorted(children(server.process.pid)))

    def test_sticky_session(self):
        server = self.server(4, "--routing-policy", "round-robin", "--session-header", "X-Session")
        for session in ("anna", "boris", "clara"):
            before = [submitted(server, i) for i in range(4)]
            for _ in range(8):
                headers = KEY + "X-Session: %s\r\n" % session
                self.assertEqual(server.post("/v1/completions", body(2, False), headers).status, 200)
            time.sleep(0.3)
            taken = sorted(submitted(server, i) - before[i] for i in range(4))
            self.assertEqual(taken, [0, 0, 0, 8])

    def test_thread(self):
        """--no-engine-process: the same through the same link, in one process."""
        server = self.server(2, "--no-engine-process")
        self.assertEqual(children(server.process.pid), [])
        for _ in range(4):
            self.assertEqual(server.post("/v1/completions", body(5, False), KEY).status, 200)
        self.assertEqual(Stream(server, 50).end(), "whole")


@unittest.skipUnless(default_model(), "skipped: the default model was not fetched")
class Golden(Base):
    """Two replicas of the default model answer as one does."""

    def answers(self, server):
        prompts = ["The capital of France is", "def fibonacci(n):", "Water boils at", "Once upon a time"]
        out = []
        for prompt in prompts * 2:
            ask = {"model": "default", "prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": False}
            reply = server.post("/v1/completions", json.dumps(ask), KEY)
            self.assertEqual(reply.status, 200, reply.body)
            out.append(json.loads(reply.body)["choices"][0]["text"])
        self.assertEqual(out[:4], out[4:])
        return out

    def test_same(self):
        flags = ("--device", "cpu", "--kv-cache-memory-bytes", "64M", "--routing-policy", "round-robin")
        one = self.answers(self.server(1, *flags, model=default_model()))
        server = self.server(2, *flags, model=default_model())
        self.assertEqual(self.answers(server), one)
        self.assertEqual([submitted(server, i, "default") for i in (0, 1)], [4, 4])
        begun = time.monotonic()
        victim = replicas(server)[0]
        send(victim["pid"])
        self.wait_death(server, 0, 0, 0.5)
        self.wait_up(server, 2, victim["last_start_seconds"] + 5)
        self.assertLess(time.monotonic() - begun, (victim["last_start_seconds"] + 5.5) * SLOW)
        self.assertEqual(self.answers(server), one)

    def test_prefixes(self):
        """Each document's questions go to the engine that has it."""
        flags = ("--device", "cpu", "--kv-cache-memory-bytes", "64M", "--block-size", "16", "--max-model-len", "1024")
        server = self.server(2, *flags, model=default_model())
        documents = [("Document %d says: " % i) + "the tide of number %d comes and goes. " % i * 30 for i in range(4)]
        for question in ("Who?", "What?", "When?", "Where?"):
            for text in documents:
                ask = {"model": "default", "prompt": text + question, "max_tokens": 2, "temperature": 0}
                self.assertEqual(server.post("/v1/completions", json.dumps(ask), KEY).status, 200)
        looked_up = server.metric("vllm:prefix_cache_queries_total")
        self.assertGreater(server.metric("vllm:prefix_cache_hits_total") / looked_up, 0.65)  # at best 0.75
        for i in (0, 1):  # both have some
            self.assertGreater(submitted(server, i, "default"), 0)

    def test_ranks(self):
        """Two replicas of three ranks each answer as one of them does."""
        one = self.answers(self.server(1, *RANKS, model=default_model()))
        server = self.server(2, *RANKS, "--routing-policy", "round-robin", model=default_model())
        self.assertEqual(self.answers(server), one)

    def test_fault_of_a_rank(self):
        """The device call of one rank's thread fails: that is the end of its engine alone."""
        for _ in range(ROUNDS):
            flags = (*RANKS, "--routing-policy", "round-robin")
            server = self.server(2, *flags, env={"QUIRE_FAULT": "rank:1,step:40,fail"}, model=default_model())
            body = {"model": "default", "prompt": "Count: one, two,", "max_tokens": 60, "temperature": 0}
            body["stream"] = True
            begun = time.monotonic()
            reply = server.post("/v1/completions", json.dumps({**body, "ignore_eos": True}), KEY)
            self.assertIn(b'"error"', reply.body)
            self.assertTrue(reply.body.endswith(b"data: [DONE]\n\n"))
            server.wait_line("the engine died")
            self.assertLess(time.monotonic() - begun, 20 * SLOW)
            self.assertEqual([r["deaths"] for r in replicas(server)], [1, 0])
            self.assertIn("rank 1", replicas(server)[0]["last_death"])
            again = server.post("/v1/completions", json.dumps({**body, "max_tokens": 10, "stream": False}), KEY)
            self.assertEqual(again.status, 200)
            self.wait_up(server, 2, replicas(server)[1]["last_start_seconds"] + 5)


if __name__ == "__main__":
    unittest.main(verbosity=2)
