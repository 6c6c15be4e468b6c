"""The real binary with the default model: many streams with clients that vanish, and the same tokens whatever surrounds
a request. Standard library only. QUIRE_LONG=1: the full 60 seconds of streams."""

import json
import os
import random
import socket
import subprocess
import tempfile
import threading
import time
import unittest

from http_support import REAL, Server, default_model, post, read_reply

MODEL = default_model()
SECONDS = 60 if os.environ.get("QUIRE_LONG") else 12
FINISHED = "vllm:request_success_total"


def ids_of(server, prompt, max_tokens=24, **extra):
    """Token ids that the server gives for a prompt, and how many of the prompt's came from the cache."""
    body = {"text": prompt, "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}}
    body["sampling_params"].update(extra)
    reply = server.post("/generate", json.dumps(body))
    if reply.status != 200:
        raise AssertionError("%d: %r" % (reply.status, reply.body[:300]))
    answer = json.loads(reply.body)
    return answer["output_ids"], answer["meta_info"]["cached_tokens"]


def together(calls):
    """Runs the calls at once and returns their results in order."""
    results = [None] * len(calls)

    def run(i):
        try:
            results[i] = calls[i]()
        except Exception as problem:
            results[i] = problem

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for r in results:
        if isinstance(r, Exception):
            raise r
    return results


def words(seed, count):
    rng = random.Random(seed)
    pool = "stone river clock paper amber quiet seven engine harbour winter lemon north glass field morning".split()
    return " ".join(rng.choice(pool) for _ in range(count))


@unittest.skipUnless(MODEL, "skipped: the default model is not fetched (./deploy/quickstart --no-serve)")
class RealEngine(unittest.TestCase):
    def test_capital(self):
        with Server(model=MODEL) as server:
            reply = server.post("/generate", '{"prompt":"The capital of France is","max_tokens":8,"temperature":0}')
            self.assertEqual(reply.status, 200)
            self.assertIn("Paris", json.loads(reply.body)["text"][0])

    def test_streams_and_vanishing_clients(self):
        """64 streams at once, many of them cut; afterwards nothing is held and each request has one finish reason."""
        with Server(model=MODEL) as server:
            end = time.monotonic() + SECONDS
            seen = {"whole": 0, "cut": 0}
            lock = threading.Lock()

            def client(number):
                rng = random.Random(number)
                while time.monotonic() < end:
                    body = json.dumps(
                        {
                            "prompt": words(rng.random(), rng.randint(1, 120)),
                            "stream": True,
                            "max_tokens": rng.randint(1, 48),
                            "temperature": rng.choice([0, 1]),
                            "n": 1,
                            "seed": number,
                            "ignore_eos": rng.random() < 0.5,
                        }
                    )
                    path = "/v1/completions" if rng.random() < 0.5 else "/generate"
                    cut = rng.random() < 0.5
                    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
                        sock.sendall(post(path, body))
                        if cut:
                            sock.settimeout(rng.uniform(0, 0.8) + 1e-3)
                            try:
                                for _ in range(rng.randint(0, 6)):
                                    sock.recv(4096)
                            except socket.timeout:
                                pass
                        else:
                            reply = read_reply(sock)
                            if reply.status != 200:
                                raise AssertionError("%d %r" % (reply.status, reply.body[:200]))
                    with lock:
                        seen["cut" if cut else "whole"] += 1

            together([lambda n=n: client(n) for n in range(64)])
            self.assertGreater(seen["cut"], 20)
            self.assertGreater(seen["whole"], 20)
            server.until(
                lambda: server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") == 0, 20
            )
            state = lambda s: sum(
                server.metric('quire:kv_pages{model_name="default",engine="0",state="%s"' % x) for x in s
            )
            server.until(lambda: state(["held"]) == 0, 5)
            total = server.metric("vllm:cache_config_info")  # the series is there
            self.assertEqual(total, 1)
            text = server.get("/metrics").body.decode()
            pages = int(text.split('num_gpu_blocks="')[1].split('"')[0]) - 1  # page 0 is the dummy
            self.assertEqual(state(["free", "cached"]), pages)
            admitted = server.metric("quire:requests_admitted_total")
            self.assertEqual(server.metric(FINISHED), admitted)
            self.assertGreater(admitted, seen["whole"])
            self.assertGreater(server.metric(FINISHED + '{model_name="default",engine="0",finished_reason="abort"'), 0)

    def test_same_tokens(self):
        """Alone, among 31 others, cold, with a warm prefix: bit for bit the same tokens."""
        prompts = [words(i, 60 + 9 * i) for i in range(32)]
        with Server(model=MODEL) as server:
            alone, cached = ids_of(server, prompts[5])
            self.assertEqual(cached, 0)
            warm, cached = ids_of(server, prompts[5])
            self.assertGreater(cached, 0)
            self.assertEqual(warm, alone)
            drawn, _ = ids_of(server, prompts[7], temperature=0.9, sampling_seed=11, top_p=0.95, repetition_penalty=1.1)
        with Server("--no-enable-prefix-caching", model=MODEL) as server:
            crowd = together([lambda p=p: ids_of(server, p)[0] for p in prompts])
            self.assertEqual(crowd[5], alone)
            calls = [lambda p=p: ids_of(server, p)[0] for p in prompts[:7] + prompts[8:]]
            calls.insert(
                7,
                lambda: ids_of(
                    server, prompts[7], temperature=0.9, sampling_seed=11, top_p=0.95, repetition_penalty=1.1
                )[0],
            )
            again = together(calls)
            self.assertEqual(again[7], drawn)
            self.assertEqual(again[5], alone)
            self.assertEqual([a for i, a in enumerate(again) if i != 7], [c for i, c in enumerate(crowd) if i != 7])

    def test_same_tokens_after_preemption(self):
        prompts = [words(100 + i, 100) for i in range(12)]
        page = 16 * 23040
        with Server(model=MODEL) as server:
            alone = [ids_of(server, p, 60)[0] for p in prompts]
        with Server(
            "--kv-cache-memory-bytes", str(40 * page), "--block-size", "16", "--max-model-len", "512", model=MODEL
        ) as server:
            crowded = together([lambda p=p: ids_of(server, p, 60)[0] for p in prompts])
            self.assertGreater(server.metric("vllm:num_preemptions_total"), 0)
            self.assertEqual(crowded, alone)

    def test_too_large_for_the_pool(self):
        page = 16 * 23040
        with Server("--kv-cache-memory-bytes", str(20 * page), "--block-size", "16", model=MODEL) as server:
            reply = server.post("/generate", json.dumps({"prompt": words(1, 400), "max_tokens": 100}))
            self.assertEqual(reply.status, 400)
            self.assertIn(b"320", reply.body)  # 20 pages of 16 tokens, said with the arithmetic
            self.assertEqual(server.post("/generate", '{"prompt":"Hi","max_tokens":2}').status, 200)


class RandomWeights(unittest.TestCase):
    """--load-format dummy from a config.json alone: what benches need, and no more."""

    CONFIG = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    }

    def test_config_alone(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "config.json"), "w") as file:
                json.dump(self.CONFIG, file)
            refused = subprocess.run(
                [REAL, "serve", folder, "--port", "0"], capture_output=True, text=True, timeout=60
            )
            self.assertEqual(refused.returncode, 2)
            self.assertIn("model.safetensors", refused.stderr)
            self.assertIn("--load-format dummy", refused.stderr)
            flags = ("--load-format", "dummy", "--kv-cache-memory-bytes", "16M")
            with Server(*flags, model=folder) as server:
                body = {"model": "default", "prompt": [5, 6, 7], "max_tokens": 9, "temperature": 0, "ignore_eos": True}
                answers = [json.loads(server.post("/v1/completions", json.dumps(body)).body) for _ in range(2)]
                self.assertEqual(answers[0]["usage"]["completion_tokens"], 9)
                self.assertEqual(answers[0]["choices"][0]["text"], answers[1]["choices"][0]["text"])
                reply = server.post(
                    "/generate", '{"input_ids":[5,6,7],"sampling_params":{"max_new_tokens":4,"ignore_eos":true}}'
                )
                self.assertEqual(len(json.loads(reply.body)["output_ids"]), 4)
                self.assertEqual(server.post("/generate", '{"prompt":"bytes","max_tokens":2}').status, 200)
                chat = '{"model":"default","messages":[{"role":"user","content":"x"}]}'
                self.assertEqual(server.post("/v1/chat/completions", chat).status, 400)
                self.assertGreater(server.metric("quire:decode_steps_total"), 0)
                replays = server.metric("quire:graph_replays_total")
                if any("kind=cuda" in line for line in server.lines):
                    self.assertGreater(replays, 0)
                else:
                    self.assertEqual(replays, 0)

    @unittest.skipIf(os.path.exists("/dev/nvidiactl"), "there is a GPU")
    def test_no_gpu(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "config.json"), "w") as file:
                json.dump(self.CONFIG, file)
            command = [REAL, "serve", folder, "--load-format", "dummy", "--port", "0", "--device", "cuda"]
            refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
            self.assertEqual(refused.returncode, 2)
            said = [line for line in refused.stderr.splitlines() if not line.startswith("time=")]
            self.assertEqual(len(said), 1, refused.stderr)


if __name__ == "__main__":
    unittest.main()
