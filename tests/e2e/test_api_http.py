"""Every dialect over plain HTTP: streams say what replies say, and bad input gets one sentence in its own envelope."""

import json
import os
import socket
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from lib import Server  # noqa: E402

FRANCE = "The capital of France is"


def setUpModule():
    global server
    server = Server()


def tearDownModule():
    server.close()


class VllmDemo(unittest.TestCase):
    def test_reply_and_stream(self):
        body = {"prompt": FRANCE, "max_tokens": 8, "temperature": 0}
        whole = server.post("/generate", body)
        self.assertEqual(whole.status, 200)
        text = whole.json()["text"]
        self.assertEqual(len(text), 1)
        self.assertTrue(text[0].startswith(FRANCE) and len(text[0]) > len(FRANCE))
        if not server.fake:
            self.assertIn("Paris", text[0])
        lines = [json.loads(l) for l in server.post("/generate", {**body, "stream": True}).body.decode().splitlines()]
        self.assertEqual(lines[-1]["text"], text)
        for before, after in zip(lines, lines[1:]):
            self.assertTrue(after["text"][0].startswith(before["text"][0]))
            self.assertNotEqual(after["text"], before["text"])

    def test_samples(self):
        body = {"prompt": FRANCE, "max_tokens": 6, "n": 3, "seed": 5}
        text = server.post("/generate", body).json()["text"]
        self.assertEqual(len(text), 3)
        lines = server.post("/generate", {**body, "stream": True}).body.decode().splitlines()
        self.assertEqual(json.loads(lines[-1])["text"], text)

    def test_neither_dialect(self):
        for body in ({}, {"prompt": "a", "inputs": "b"}, {"text": "a", "inputs": "b"}):
            reply = server.post("/generate", body)
            self.assertEqual(reply.status, 400)
            for name in ("vLLM", "SGLang", "TGI"):
                self.assertIn(name, reply.json()["error"]["message"])


class Sglang(unittest.TestCase):
    def test_reply_and_stream(self):
        body = {"text": FRANCE, "rid": "my-1", "sampling_params": {"max_new_tokens": 6, "temperature": 0}}
        one = server.post("/generate", body).json()
        meta = one["meta_info"]
        self.assertEqual(meta["id"], "my-1")
        self.assertEqual(meta["completion_tokens"], 6)
        self.assertEqual(meta["finish_reason"], {"type": "length", "length": 6})
        self.assertEqual(len(one["output_ids"]), 6)
        self.assertGreater(meta["e2e_latency"], 0)
        reply = server.post("/generate", {**body, "stream": True})
        self.assertTrue(reply.headers["content-type"].startswith("text/event-stream"))
        self.assertEqual(reply.headers["x-accel-buffering"], "no")
        events = reply.events()
        self.assertEqual(events[-1], "[DONE]")
        last = events[-2]
        self.assertEqual((last["text"], last["output_ids"]), (one["text"], one["output_ids"]))
        self.assertEqual(last["meta_info"]["finish_reason"], meta["finish_reason"])
        self.assertEqual(last["meta_info"]["completion_tokens"], 6)
        for before, after in zip(events[:-1], events[1:-1]):
            self.assertTrue(after["text"].startswith(before["text"]))
            self.assertIsNone(before["meta_info"]["finish_reason"])

    def test_batch_and_ids(self):
        ids = server.post("/tokenize", {"prompt": FRANCE}).json()["tokens"]
        params = {"max_new_tokens": 4, "temperature": 0}
        by_text = server.post("/generate", {"text": FRANCE, "sampling_params": params}).json()
        by_ids = server.post("/generate", {"input_ids": [ids, ids[:2]], "sampling_params": params}).json()
        self.assertEqual(len(by_ids), 2)
        self.assertEqual(by_ids[0]["text"], by_text["text"])
        self.assertEqual(by_ids[1]["meta_info"]["prompt_tokens"], 2)

    def test_logprobs(self):
        reply = server.post(
            "/generate",
            {
                "text": FRANCE,
                "sampling_params": {"max_new_tokens": 3, "temperature": 0},
                "return_logprob": True,
                "top_logprobs_num": 2,
                "return_text_in_logprobs": True,
            },
        ).json()
        tuples, tops = reply["meta_info"]["output_token_logprobs"], reply["meta_info"]["output_top_logprobs"]
        self.assertEqual([t[1] for t in tuples], reply["output_ids"])
        self.assertTrue(all(len(top) == 2 for top in tops))
        self.assertTrue(all(t[0] <= 0 and isinstance(t[2], str) for t in tuples))
        if not server.fake:
            self.assertEqual([top[0][:2] for top in tops], [t[:2] for t in tuples])  # greedy: the drawn one is the best


class OpenAi(unittest.TestCase):
    def both(self, path, body, text_of, delta_of):
        """A reply, and the same through a stream: text, reasons and usage must agree."""
        whole = server.post(path, body)
        self.assertEqual(whole.status, 200, whole.body)
        whole = whole.json()
        reply = server.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
        events = reply.events()
        self.assertEqual(events[-1], "[DONE]")
        self.assertEqual(events[-2]["choices"], [])
        self.assertEqual(events[-2]["usage"]["completion_tokens"], whole["usage"]["completion_tokens"])
        self.assertEqual(events[-2]["usage"]["prompt_tokens"], whole["usage"]["prompt_tokens"])
        texts, reasons = {}, {}
        for event in events[:-2]:
            (choice,) = event["choices"]
            delta = delta_of(choice)
            self.assertTrue(delta or choice["finish_reason"], event)  # no empty deltas
            self.assertNotIn(choice["index"], reasons)
            texts[choice["index"]] = texts.get(choice["index"], "") + (delta or "")
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
        self.assertEqual(texts, {c["index"]: text_of(c) for c in whole["choices"]})
        self.assertEqual(reasons, {c["index"]: c["finish_reason"] for c in whole["choices"]})
        return whole, events

    def completions(self, body):
        return self.both("/v1/completions", body, lambda c: c["text"], lambda c: c["text"])

    def test_completions(self):
        whole, _ = self.completions({"model": server.model, "prompt": FRANCE, "max_tokens": 8, "temperature": 0})
        self.assertTrue(whole["id"].startswith("cmpl-"))
        self.assertEqual(whole["usage"]["completion_tokens"], 8)
        self.assertIn("cached_tokens", whole["usage"]["prompt_tokens_details"])
        whole, _ = self.completions({"prompt": [FRANCE, "Hello"], "n": 2, "max_tokens": 5, "seed": 3})
        self.assertEqual(len(whole["choices"]), 4)
        if all(c["finish_reason"] == "length" for c in whole["choices"]):
            self.assertEqual(whole["usage"]["completion_tokens"], 20)
        whole, _ = self.completions({"prompt": FRANCE, "echo": True, "max_tokens": 3, "temperature": 0})
        self.assertTrue(whole["choices"][0]["text"].startswith(FRANCE))

    def test_chat(self):
        body = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 12, "temperature": 0}
        whole, events = self.both(
            "/v1/chat/completions", body, lambda c: c["message"]["content"], lambda c: c["delta"].get("content")
        )
        self.assertTrue(whole["id"].startswith("chatcmpl-"))
        self.assertEqual(events[0]["choices"][0]["delta"]["role"], "assistant")
        self.assertTrue(all("role" not in e["choices"][0]["delta"] for e in events[1:-2]))

    def test_characters_cut_by_max_tokens(self):
        for tokens in range(1, 7):
            self.completions(
                {
                    "prompt": "Some emoji: \U0001f44b\U0001f600\U0001f44b\U0001f600\U0001f44b\U0001f600",
                    "max_tokens": tokens,
                    "temperature": 0,
                }
            )

    def test_stop_strings(self):
        if server.fake:
            self.skipTest("skipped: needs the model")
        free = server.post("/v1/completions", {"prompt": FRANCE, "max_tokens": 24, "temperature": 0}).json()["choices"][
            0
        ]["text"]
        for begin, length in ((2, 3), (5, 1), (9, 6)):
            stop = free[begin : begin + length]
            whole, _ = self.completions({"prompt": FRANCE, "max_tokens": 24, "temperature": 0, "stop": [stop]})
            choice = whole["choices"][0]
            self.assertEqual(
                (choice["text"], choice["finish_reason"], choice["stop_reason"]),
                (free[: free.index(stop)], "stop", stop),
            )
        whole, events = self.completions({"prompt": FRANCE, "max_tokens": 6, "temperature": 0, "stop": ["ZZZZZZZZ"]})
        self.assertGreater(len(events), 5)  # an absent stop holds nothing back

    def test_seed(self):
        body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.5, "seed": 42}
        first, second = (server.post("/v1/completions", body).json()["choices"][0]["text"] for _ in range(2))
        self.assertEqual(first, second)

    def test_label(self):
        reply = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, {"X-Request-Id": "trace.7"})
        self.assertEqual(reply.json()["id"], "cmpl-trace.7")
        self.assertEqual(reply.headers["x-request-id"], "trace.7")
        reply = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, {"X-Request-Id": "no spaces"})
        self.assertNotIn("no spaces", reply.json()["id"])

    def test_models(self):
        model = server.get("/v1/models").json()["data"][0]
        self.assertEqual(server.get("/v1/models/" + model["id"]).json(), model)
        self.assertEqual(server.get("/v1/models/nobody").status, 404)
        self.assertGreater(model["max_model_len"], 0)

    def test_tokens(self):
        text = "Hello, world!" if server.fake else "Hello, w\u00f6rld! \U0001f44b"
        reply = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
        self.assertEqual(reply["count"], len(reply["tokens"]))
        self.assertEqual(len(reply["token_strs"]), reply["count"])
        self.assertEqual(server.post("/detokenize", {"tokens": reply["tokens"]}).json(), {"prompt": text})
        if not server.fake:  # a NUL is a token like any other
            letter = server.post("/tokenize", {"prompt": "a"}).json()["tokens"]
            reply_nul = server.post("/detokenize", {"tokens": [190] + letter}).json()
            self.assertEqual(reply_nul, {"prompt": "\0a"})
        chat = server.post("/tokenize", {"messages": [{"role": "user", "content": text}]}).json()
        self.assertGreater(chat["count"], reply["count"])
        # Longer than the context and than what is read on the loop.
        self.assertEqual(server.post("/tokenize", {"prompt": "word " * 20000}).status, 200)


class BadInput(unittest.TestCase):
    def refused(self, path, body, status, field=None, part=""):
        begin = time.monotonic()
        reply = server.post(path, body)
        took = time.monotonic() - begin
        self.assertEqual(reply.status, status, (str(body)[:300], reply.body))
        self.assertLess(took, 5, str(body)[:300])  # nothing hangs; how fast it is, the benches say
        error = reply.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        self.assertTrue(message)
        self.assertIn(part, message)
        if field and isinstance(error, dict):
            self.assertEqual(error["param"], field)
        return reply.json()

    def test_openai(self):
        big = 10**30
        for field, value in (
            ("n", 0),
            ("n", 10**9),
            ("n", 1.5),
            ("n", "1"),
            ("max_tokens", 0),
            ("max_tokens", -1),
            ("max_tokens", big),
            ("temperature", -1),
            ("temperature", 3),
            ("temperature", "x"),
            ("top_p", 0),
            ("top_p", 2),
            ("top_k", -5),
            ("logprobs", 99),
            ("seed", big),
            ("seed", 0.5),
            ("stop", [""]),
            ("stop", 5),
            ("stop_token_ids", [10**9]),
            ("stop_token_ids", [big]),
            ("stop_token_ids", ["a"]),
            ("logit_bias", {"999999999": 1}),
            ("logit_bias", {"x": 1}),
            ("logit_bias", {"1": "x"}),
            ("presence_penalty", 5),
            ("min_tokens", -1),
            ("min_tokens", 1000),
            ("stream", 1),
            ("prompt", []),
            ("prompt", ""),
            ("prompt", None),
            ("prompt", 5),
            ("prompt", [-1]),
            ("prompt", [10**9]),
            ("prompt", [big]),
            ("prompt", [[]]),
            ("prompt", ["a", 1]),
            ("prompt", ["a"] * 257),
            ("suffix", "x"),
            ("bad_words", ["x"]),
            ("guided_json", {"a": 1}),
            ("guided_json", {}),
            ("lora_request", {"lora_name": "a"}),
        ):
            self.refused("/v1/completions", {"prompt": "a", field: value}, 400, field)
        self.refused("/v1/completions", {"prompt": "a", "model": "x"}, 404, "model", "The model `x` does not exist.")
        self.refused("/v1/completions", '{"prompt":"a","temperature":1e999}', 400, "temperature")
        self.refused("/v1/completions", '{"prompt":"a","prompt":"b"}', 400, None, "twice")
        for body in (
            "",
            "{",
            "[]",
            "{'a':1}",
            '{"prompt":"a"}x',
            "[" * 100000,
            b'{"prompt":"\xff"}',
            b'{"prompt":"\xed\xa0\x80"}',
            '{"prompt":"\\ud800"}',
            '{"prompt":"a\nb"}',
            '{"prompt":"a","n":01}',
            "{" + '"a":{' * 100,
        ):
            self.refused("/v1/completions", body, 400)

    def test_too_long(self):
        self.refused("/v1/completions", {"prompt": "a " * 2000000}, 400, "input_tokens", "at least")
        self.refused(
            "/v1/completions", {"prompt": "Hi", "max_tokens": 2**31 - 1}, 400, "input_tokens", "maximum context length"
        )
        self.refused(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 2000000}]}, 400, "input_tokens"
        )
        error = self.refused("/generate", {"inputs": "a " * 2000000}, 422, None, "must have less than")
        self.assertEqual(error["error_type"], "validation")
        self.refused("/generate", {"text": "a " * 2000000}, 400, None, "longer than the model's context length")

    def test_chat(self):
        user = [{"role": "user", "content": "U"}]
        for field, value in (
            ("messages", []),
            ("messages", "x"),
            ("messages", [1]),
            ("messages", [{"role": "user"}]),
            ("messages", [{"role": "user", "content": [{"type": "image_url"}]}]),
            ("tools", []),
            ("tool_choice", "required"),
            ("response_format", {"type": "json_object"}),
            ("top_logprobs", 3),
            ("max_completion_tokens", 0),
        ):
            self.refused("/v1/chat/completions", {"messages": user, field: value}, 400, field)

    def test_other_envelopes(self):
        self.assertEqual(
            set(self.refused("/generate", {"text": "a", "sampling_params": {"top_k": 0}}, 400)["error"]), {"message"}
        )
        error = self.refused("/generate", {"inputs": "a", "parameters": {"top_k": 0}}, 422)
        self.assertEqual(error["error_type"], "validation")
        self.refused("/generate_stream", {"inputs": ""}, 422)
        self.refused("/detokenize", {"tokens": [2**70]}, 400, "tokens")
        self.refused("/detokenize", {"tokens": [-1]}, 400, "tokens")
        self.refused("/tokenize", {}, 400, "prompt")
        self.refused("/tokenize", {"prompt": "a" * (5 << 20)}, 400, "prompt")

    def test_neighbours_are_undisturbed(self):
        body = {"prompt": FRANCE, "max_tokens": 8, "temperature": 0}
        before = server.post("/v1/completions", body).json()["choices"]
        for bad in (
            {"prompt": [10**9]},
            {"prompt": "a", "stop_token_ids": [999999], "min_tokens": 1},
            {"prompt": "a", "logit_bias": {"-1": 5}},
        ):
            self.assertEqual(server.post("/v1/completions", bad).status, 400)
        self.assertEqual(server.post("/v1/completions", body).json()["choices"], before)


class Counters(unittest.TestCase):
    """/metrics counts a request whole, its last event included, streamed or not."""

    def test_sums_are_exact(self):
        per_request = ("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
                       "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                       "request_prefill_time_seconds", "request_decode_time_seconds",
                       "request_inference_time_seconds", "request_time_per_output_token_seconds")
        own = Server()
        try:
            def read():
                series = ["vllm:%s_%s{" % (name, end) for name in per_request for end in ("count", "sum")]
                series += ["vllm:inter_token_latency_seconds_count{", "vllm:generation_tokens_total{"]
                return {s: own.metric(s) for s in series}

            for n, tokens, stream in ((1, 5, False), (1, 20, True), (1, 20, False), (3, 7, False), (2, 7, True)):
                with self.subTest(n=n, tokens=tokens, stream=stream):
                    before = read()
                    body = {"prompt": FRANCE, "max_tokens": tokens, "n": n, "ignore_eos": True, "stream": stream,
                            "seed": 1}
                    self.assertEqual(own.post("/v1/completions", body).status, 200)
                    own.until(lambda: own.metric("vllm:num_requests_running") == 0)
                    after = read()
                    grown = {s: after[s] - before[s] for s in after}
                    for name in per_request:
                        self.assertEqual(grown["vllm:%s_count{" % name], 1, name)
                    self.assertEqual(grown["vllm:request_generation_tokens_sum{"], n * tokens)
                    self.assertEqual(grown["vllm:request_max_num_generation_tokens_sum{"], tokens)
                    self.assertEqual(grown["vllm:generation_tokens_total{"], n * tokens)
                    self.assertEqual(grown["vllm:inter_token_latency_seconds_count{"], n * (tokens - 1))
                    self.assertGreater(grown["vllm:request_inference_time_seconds_sum{"], 0)
                    parts = sum(grown["vllm:request_%s_time_seconds_sum{" % name] for name in ("prefill", "decode"))
                    self.assertAlmostEqual(parts, grown["vllm:request_inference_time_seconds_sum{"], places=6)
        finally:
            own.close()


class Leaving(unittest.TestCase):
    def test_gone_clients_are_cancelled(self):
        for stream in (True, False):
            for _ in range(5):
                body = json.dumps({"prompt": "Count", "max_tokens": 400, "ignore_eos": True, "stream": stream})
                sock = socket.create_connection((server.host, server.port))
                sock.sendall(
                    (
                        "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
                    ).encode()
                )
                if stream:
                    sock.recv(64)
                else:
                    time.sleep(0.05)
                sock.close()
            server.until(
                lambda: server.metric("vllm:num_requests_running") == 0
                and server.metric("vllm:num_requests_waiting") == 0
            )
        self.assertEqual(server.get("/load").json(), {"server_load": 0})

    def test_abort_by_name(self):
        body = json.dumps(
            {
                "text": "Count",
                "rid": "stop-me",
                "stream": True,
                "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True},
            }
        )
        slow = Server(fake=True, env={"QUIRE_FAKE_STEP_US": "20000"})
        try:
            sock = socket.create_connection((slow.host, slow.port), timeout=20)
            sock.sendall(
                ("POST /generate HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)).encode()
            )
            data = sock.recv(4096)
            self.assertEqual(slow.post("/abort_request", {"rid": "stop-me"}).json(), {"aborted": 1})
            while b"[DONE]" not in data:
                piece = sock.recv(65536)
                self.assertTrue(piece)
                data = (data + piece)[-4096:]
            self.assertIn(b'"type":"abort"', data)
            sock.close()
            self.abort_others(slow)
        finally:
            slow.close()

    def abort_others(self, slow):
        """A chat by the client's own label, without the prefix of the reply's id; one prompt of a list by its rid."""
        chat = {"messages": [{"role": "user", "content": "Count"}], "max_tokens": 2000, "ignore_eos": True,
                "request_id": "my-chat"}
        two = {"text": ["Count", "Count"], "rid": ["one", "two"],
               "sampling_params": {"max_new_tokens": 150, "ignore_eos": True}}
        replies = {}
        for path, body, label in (("/v1/chat/completions", chat, "my-chat"), ("/generate", two, "two")):
            thread = threading.Thread(target=lambda p=path, b=body: replies.update({p: slow.post(p, b).json()}))
            thread.start()
            slow.until(lambda: slow.get("/load").json() == {"server_load": 1})
            time.sleep(0.2)
            self.assertEqual(slow.post("/abort_request", {"rid": "one-of-nobody"}).json(), {"aborted": 0})
            self.assertEqual(slow.post("/abort_request", {"rid": "x" * 10000}).status, 400)
            self.assertEqual(slow.post("/abort_request", {"rid": label}).json(), {"aborted": 1})
            thread.join(20)
        self.assertEqual(replies["/v1/chat/completions"]["choices"][0]["finish_reason"], "abort")
        ends = [answer["meta_info"]["finish_reason"]["type"] for answer in replies["/generate"]]
        self.assertEqual(ends, ["length", "abort"])

    def test_slow_reader(self):
        """A client that does not read holds nothing up, and reads the same text later in fewer, longer chunks."""
        fast = Server(fake=True, flags=("--max-output-bytes", "65536"))
        try:
            body = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}
            want = fast.post("/v1/completions", body).json()["choices"][0]["text"]
            text = json.dumps({**body, "stream": True})
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((fast.host, fast.port))
            sock.settimeout(20)
            sock.sendall(
                (
                    "POST /v1/completions HTTP/1.0\r\nHost: t\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)
                ).encode()
            )
            fast.until(lambda: fast.metric("vllm:num_requests_running") == 0)
            self.assertEqual(fast.post("/v1/completions", {**body, "max_tokens": 5}).status, 200)
            data = b""
            while True:
                piece = sock.recv(65536)
                if not piece:
                    break
                data += piece
            chunks = [
                json.loads(b[5:])
                for b in data.split(b"\r\n\r\n", 1)[1].decode().split("\n\n")
                if b.startswith("data: {")
            ]
            self.assertEqual("".join(c["choices"][0]["text"] for c in chunks), want)
            self.assertLess(len(chunks), 3000)
            sock.close()
        finally:
            fast.close()


STREAMS = (
    ("/v1/completions", {"prompt": "a", "max_tokens": 5000, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
    ("/generate", {"prompt": "a", "max_tokens": 5000, "stream": True}),
    ("/generate", {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 5000}}),
    ("/generate_stream", {"inputs": "a"}),
)


class Endings(unittest.TestCase):
    def streams(self, slow):
        socks = []
        for path, body in STREAMS:
            sock = socket.create_connection((slow.host, slow.port), timeout=20)
            text = json.dumps(body)
            sock.sendall(
                ("POST %s HTTP/1.0\r\nHost: t\r\nContent-Length: %d\r\n\r\n%s" % (path, len(text), text)).encode()
            )
            socks.append(sock)
        for sock in socks:
            sock.recv(16)
        return socks

    def tails(self, socks):
        """The last events or lines of each stream."""
        out = []
        for sock in socks:
            data = b""
            while True:
                piece = sock.recv(65536)
                if not piece:
                    break
                data += piece
            sock.close()
            lines = [l for l in data.decode().splitlines() if l]
            out.append([l[5:].strip() if l.startswith("data:") else l for l in lines])
        return out

    def test_the_engine_dies(self):
        """Every stream ends with an error in its own dialect, and the server goes on with another engine."""
        slow = Server(fake=True, env={"QUIRE_FAKE_STEP_US": "5000", "QUIRE_FAKE_DIE_AFTER": "60"})
        try:
            completions, chat, vllm, sglang, tgi = self.tails(self.streams(slow))
            slow.until(lambda: slow.get("/health/ready").status == 200)
        finally:
            slow.close()
        for lines in (completions, chat):
            self.assertEqual(lines[-1], "[DONE]")
            self.assertEqual(json.loads(lines[-2])["error"]["code"], 500)
        self.assertEqual(json.loads(vllm[-1])["error"]["code"], 500)
        self.assertEqual(sglang[-1], "[DONE]")
        self.assertEqual(json.loads(sglang[-2])["error"]["code"], 500)
        self.assertEqual(json.loads(tgi[-1])["error_type"], "incomplete_generation")

    def test_the_drain_limit_passes(self):
        """Every stream ends with a reason."""
        slow = Server(fake=True, flags=("--shutdown-timeout", "1"), env={"QUIRE_FAKE_STEP_US": "20000"})
        try:
            socks = self.streams(slow)
            slow.process.terminate()
            completions, chat, vllm, sglang, tgi = self.tails(socks)
        finally:
            slow.close()
        for lines in (completions, chat):
            self.assertEqual(lines[-1], "[DONE]")
            self.assertEqual(json.loads(lines[-2])["choices"][0]["finish_reason"], "abort")
        self.assertIn("text", json.loads(vllm[-1]))
        self.assertEqual(json.loads(sglang[-2])["meta_info"]["finish_reason"]["type"], "abort")
        self.assertIn("shutting down", json.loads(tgi[-1])["error"])


if __name__ == "__main__":
    unittest.main()
