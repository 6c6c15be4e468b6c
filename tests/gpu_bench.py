#!/usr/bin/env python3
"""The benches of tests/gpu: runs build/tools/bench_engine, the server and its clients, and keeps the figures.

usage: tests/gpu_bench.py [--build DIR] decode|prefill|offline|http|soak|comm|tp2|tp2-http|dp2|dp2-routing
       tests/gpu_bench.py --merge LOG --part NAME

A bench prints where it runs, lines "figure KEY VALUE", and a table of lines "| ..." with limit, peer and goal.
--merge takes the figures of such a log into tests/bench/h200.json and appends the table to tests/bench/SPEED.md. All on
one GPU, bf16, random weights made from a config.json (tests/bench/configs), random prompts, no prefix cache: as the
peers were measured (tests/bench/peers/h200.json). tests/gpu calls it.
"""

import argparse, ctypes, datetime, http.client, json, os, random, re, signal, subprocess, sys, tempfile, threading, time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FIGURES = os.path.join(ROOT, "tests/bench/h200.json")
PEERS = os.path.join(ROOT, "tests/bench/peers/h200.json")
CONFIGS = os.path.join(ROOT, "tests/bench/configs")
PORT = 18438

# The limit of the machine (4.25 TB/s read, 756 TFLOP/s) and the goal, by key behind "quire/".
ROWS = {
    "llama-3.2-1b/bf16/tp1/decode_step_ms/b1_ctx1k": (0.58, 0.7),
    "llama-3.2-1b/bf16/tp1/decode_step_ms/b8_ctx1k": (0.64, 0.8),
    "llama-3.2-1b/bf16/tp1/decode_step_ms/b64_ctx1k": (1.07, 1.35),
    "llama-3.1-8b/bf16/tp1/decode_step_ms/b1_ctx1k": (3.52, 3.85),
    "llama-3.1-8b/bf16/tp1/decode_step_ms/b8_ctx1k": (3.74, 4.25),
    "llama-3.1-8b/bf16/tp1/decode_step_ms/b32_ctx1k": (4.49, 5.1),
    "llama-3.1-8b/bf16/tp1/decode_step_ms/b64_ctx1k": (5.49, 6.25),
    "llama-3.1-8b/bf16/tp1/decode_step_ms/b128_ctx1k": (7.5, 9.1),
    "llama-3.1-8b/bf16/tp1/decode_step_ms/b256_ctx1k": (11.5, 14.0),
    "llama-3.1-8b/bf16/tp1/prefill_ms/b1_128": (3.5, 5.5),
    "llama-3.1-8b/bf16/tp1/prefill_ms/b1_1000": (18.6, 23),
    "llama-3.1-8b/bf16/tp1/prefill_ms/b1_2048": (37.6, 43),
    "llama-3.1-8b/bf16/tp1/prefill_ms/b1_8192": (167, 192),
    "llama-3.1-8b/bf16/tp1/batch_prefill_tok_s/b64_896": (47000, 45500),
    "llama-3.1-8b/bf16/tp1/offline_out_tok_s/r256_1000_1000": (12100, 10800),
    "llama-3.1-8b/bf16/tp1/http/best/ttft_ms/b1_128": (3.5, 7),
    "llama-3.1-8b/bf16/tp1/http/best/ttft_ms/b1_1000": (18.6, 24),
    "llama-3.1-8b/bf16/tp1/http/best/tpot_ms/b1_ctx1k": (3.52, 3.9),
    "llama-3.1-8b/bf16/tp1/http/best/load_c64_1000_200/out_tok_s": (6500, 5200),
    "llama-3.1-8b/bf16/tp1/http/best/load_c64_1000_200/itl_ms_p99": (None, 60),
    "llama-3.1-8b/bf16/tp1/http/best/load_c256_1000_200/out_tok_s": (6900, 6200),
    "llama-3.1-8b/bf16/tp1/http/warm2/start_to_first_token_s": (1, 4),
    "llama-3.1-8b/bf16/tp1/http/safetensors/start_to_first_token_s": (1, 4),
    "llama-3.1-8b/bf16/tp2/decode_step_ms/b1_ctx1k": (1.76, 2.25),
    "llama-3.1-8b/bf16/tp2/decode_step_ms/b32_ctx1k": (2.25, 2.9),
    "llama-3.1-8b/bf16/tp2/decode_step_ms/b64_ctx1k": (2.75, 3.5),
    "llama-3.1-8b/bf16/tp2/prefill_ms/b1_2048": (19, 27),
    "llama-3.1-8b/bf16/tp2/prefill_ms/b1_8192": (84, 108),
    "llama-3.1-70b/bf16/tp2/decode_step_ms/b1_ctx1k": (16.3, 18.3),
    "llama-3.1-70b/bf16/tp2/decode_step_ms/b32_ctx1k": (17.4, 20),
    "llama-3.1-70b/bf16/tp2/prefill_ms/b1_2048": (190, 222),
    "llama-3.1-8b/bf16/tp2/http/tp2/load_c64_1000_200/out_tok_s": (10000, 8300),
    "llama-3.1-70b/bf16/tp2/http/tp2/start_to_first_token_s": (3, 12),
    "llama-3.1-8b/bf16/tp1/dp2/throughput_over_dp1": (2, 1.97),
    "llama-3.1-8b/bf16/tp1/dp2/prefix_routing_over_round_robin": (None, 1.6),
    "llama-3.1-8b/bf16/tp1/dp2/prefixes_16x2048/prefix/hit_rate_of_best": (1, 0.95),
    "comm/tp2/reduce_norm_us/8k": (3, 4.5),
    "comm/tp2/reduce_norm_us/32k": (3, 4.5),
    "comm/tp2/reduce_norm_us/512k": (4.3, 6.5),
    "comm/tp2/reduce_norm_us/1m": (5.7, 9),
}


def more_is_better(key):
    return "tok_s" in key or "_over_" in key or "hit_rate" in key


class Bench:
    def __init__(self, build):
        self.build, self.figures = build, {}

    def tool(self, name):
        return os.path.join(self.build, "tools", name)

    def figure(self, key, value):
        self.figures[key] = value
        print(f"figure quire/{key} {value:.6g}", flush=True)

    def table(self):
        peers = json.load(open(PEERS))
        print("| figure | limit | vLLM 0.25 | quire | share of the limit | goal | reached |\n|" + " --- |" * 7)
        for key, value in self.figures.items():
            limit, goal = ROWS.get(key, (None, None))
            peer = peers.get("vllm-0.25.0/" + key)
            share = "" if not limit else f"{(value / limit if more_is_better(key) else limit / value):.0%}"
            reached = ""
            if goal:
                off = (goal - value if more_is_better(key) else value - goal) / goal
                reached = "yes" if off <= 0 else f"{off:.0%} off"
            cells = [key, f"{limit:g}" if limit else "", f"{peer:.5g}" if peer else "", f"{value:.5g}", share,
                     f"{goal:g}" if goal else "", reached]  # fmt: skip
            print("| " + " | ".join(cells) + " |", flush=True)


# ---- the engine alone -----------------------------------------------------------------------------------------------


def engine(bench, model, *flags, limit=500):
    path = os.path.join(bench.build, f"bench-{model}.json")
    command = [bench.tool("bench_engine"), os.path.join(CONFIGS, model), "--device", "cuda", "--load-format", "dummy",
               "--name", model, "--json", path, *flags]  # fmt: skip
    open(path, "w").close()
    r = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    print(r.stdout, flush=True)
    for key, value in re.findall(r'"quire/(\S+)": ([0-9.e+-]+)', open(path).read()):  # also of a run that broke off
        bench.figure(key, float(value))
    if r.returncode:
        raise RuntimeError(f"bench_engine ended with {r.returncode}: {r.stderr.strip()[-800:]}")


def engines(bench, *runs):
    """One after the other; a run that fails does not take the others with it."""
    failed = []
    for model, *flags in runs:
        try:
            engine(bench, model, *flags)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as e:
            print(f"{model}: {e}", flush=True)
            failed.append(e)
    if failed:
        raise failed[0]


def decode(bench):
    small = ("llama-3.2-1b", "--decode", "1,8,64", "--reps", "3")
    engines(bench, small, ("llama-3.1-8b", "--decode", "1,8,32,64,128,256", "--reps", "3"))


def prefill(bench):
    small = ("llama-3.2-1b", "--prefill", "128,1000,2048", "--reps", "5")
    large = ("llama-3.1-8b", "--prefill", "128,1000,2048,8192", "--batch-prefill", "64", "--reps", "5")
    engines(bench, small, large)


def offline(bench):
    engine(bench, "llama-3.1-8b", "--offline", "256", "--input", "1000", "--output", "1000")


# ---- over HTTP ------------------------------------------------------------------------------------------------------


class Server:
    def __init__(self, bench, model, *flags, device="cuda"):
        self.command = [os.path.join(bench.build, "quire"), "serve", model, "--port", str(PORT), "--device", device]
        self.command += ["--served-model-name", "bench", *flags]
        self.lines = []

    def __enter__(self):
        self.begin = time.monotonic()
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
        self.reader.start()
        while time.monotonic() - self.begin < 120:
            if self.process.poll() is not None:
                self.reader.join(5)
                raise RuntimeError("the server ended:\n" + "".join(self.lines[-20:]))
            try:
                if ask("GET", "/health")[0] == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.02)
        raise RuntimeError("the server did not get ready:\n" + "".join(self.lines[-20:]))

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def ask(method, path, body=None, limit=60):
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=limit)
    try:
        connection.request(method, path, json.dumps(body) if body is not None else None,
                           {"Content-Type": "application/json"} if body is not None else {})  # fmt: skip
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def client(bench, *flags, limit=200):
    command = [bench.tool("bench_serve"), "--port", str(PORT), "--model", "bench", "--vocab", "128000"]
    command += [str(flag) for flag in flags]
    r = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    print(r.stdout.strip(), flush=True)
    if r.returncode:
        raise RuntimeError(f"bench_serve ended with {r.returncode}: {(r.stderr or r.stdout).strip()[-500:]}")
    return json.loads(r.stdout)


def tp2(bench):
    """One model over two GPUs; 70B is what one cannot hold."""
    two = ("--tensor-parallel-size", "2")
    engines(bench, ("llama-3.1-8b", *two, "--decode", "1,8,32,64,128,256", "--prefill", "128,1000,2048,8192",
                    "--batch-prefill", "64", "--reps", "3"),
            ("llama-3.1-70b", *two, "--decode", "1,32", "--prefill", "2048", "--reps", "3"))  # fmt: skip


def comm(bench):
    """Collectives between two GPUs by size; the sums are checked first."""
    for kind in ("nccl", "p2p"):
        r = subprocess.run([bench.tool("bench_comm"), "--kind", kind], capture_output=True, text=True, timeout=60)
        print(r.stdout, flush=True)
        if r.returncode:
            raise RuntimeError(f"bench_comm ended with {r.returncode}: {r.stderr.strip()[-500:]}")
    for key, value in re.findall(r"^figure (\S+) (\S+)$", r.stdout, re.M):
        bench.figure(key, float(value))


def tp2_http(bench):
    key, model = "llama-3.1-8b/bf16/tp2/http/tp2", os.path.join(CONFIGS, "llama-3.1-8b")
    two = ("--load-format", "dummy", "--tensor-parallel-size", "2")
    with Server(bench, model, *two) as server:
        bench.figure(key + "/start_to_first_token_s", first_token(server))
        load(bench, key, 64)
        got = client(bench, "--in", 912, "--out", 257, "--requests", 3, "--seed", 7)
        bench.figure(f"{key}/tpot_ms/b1_ctx1k", got["tpot_p50_s"] * 1e3)
    with Server(bench, os.path.join(CONFIGS, "llama-3.1-70b"), *two) as server:
        bench.figure("llama-3.1-70b/bf16/tp2/http/tp2/start_to_first_token_s", first_token(server))


def dp2(bench):
    """The same saturating load on one replica and on two: twice as many clients on twice as many GPUs."""
    model, rates = os.path.join(CONFIGS, "llama-3.1-8b"), {}
    for replicas in (1, 2):
        with Server(bench, model, "--load-format", "dummy", "--data-parallel-size", str(replicas)):
            clients = 192 * replicas
            at_once = ("--concurrency", clients)
            client(bench, "--in", 1000, "--out", 8, *at_once, "--requests", clients, "--seed", 5)
            got = client(bench, "--in", 1000, "--out", 200, *at_once, "--requests", 4 * clients, "--seed", 77)
            rates[replicas] = got["out_tok_s"]
            bench.figure(f"llama-3.1-8b/bf16/tp1/dp{replicas}/load_c192_each_1000_200/out_tok_s", rates[replicas])
    bench.figure("llama-3.1-8b/bf16/tp1/dp2/throughput_over_dp1", rates[2] / rates[1])


def cached_share(before, after):
    """Of the prompt tokens between two scrapes, those found in a cache."""
    hits, queries = (metric(after, name) - metric(before, name)
                     for name in ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"))  # fmt: skip
    return hits / queries


def dp2_routing(bench, model=None, device="cuda", prefix=2048, requests=1000, clients=64, own=128, out=64, kv=131072):
    """16 shared prefixes on two replicas whose pools hold 10 of them (and what runs besides), by policy."""
    key, rates, pool = "llama-3.1-8b/bf16/tp1/dp2/", {}, (10 * prefix + clients // 2 * (own + out)) * kv
    flags = ("--data-parallel-size", "2", "--kv-cache-memory-bytes", str(pool), "--max-model-len", str(2 * prefix))
    if device == "cuda":
        flags += ("--load-format", "dummy")
    for policy in ("round-robin", "prefix"):
        with Server(bench, model or os.path.join(CONFIGS, "llama-3.1-8b"), "--routing-policy", policy, *flags,
                    device=device):  # fmt: skip
            client(bench, "--in", own, "--out", 8, "--concurrency", clients, "--requests", clients, "--seed", 5)
            before = ask("GET", "/metrics")[1].decode()
            got = client(bench, "--in", own, "--out", out, "--concurrency", clients, "--requests", requests,
                         "--prefixes", 16, "--prefix-tokens", prefix, "--seed", 9)  # fmt: skip
            rates[policy] = got["out_tok_s"]
            share = cached_share(before, ask("GET", "/metrics")[1].decode())
            name = policy.replace("-", "_")
            bench.figure(f"{key}prefixes_16x{prefix}/{name}/out_tok_s", got["out_tok_s"])
            bench.figure(f"{key}prefixes_16x{prefix}/{name}/hit_rate_of_best", share / got["hit_rate_best"])
    bench.figure(key + "prefix_routing_over_round_robin", rates["prefix"] / rates["round-robin"])


def load(bench, key, c):
    got = client(bench, "--in", 1000, "--out", 200, "--concurrency", c, "--requests", 4 * c, "--seed", 1000 + c)
    bench.figure(f"{key}/load_c{c}_1000_200/out_tok_s", got["out_tok_s"])
    for name in ("itl", "tpot", "ttft"):
        for p in ("p50", "p99"):
            bench.figure(f"{key}/load_c{c}_1000_200/{name}_ms_{p}", got[f"{name}_{p}_s"] * 1e3)


def over_http(bench):
    key = "llama-3.1-8b/bf16/tp1/http"
    with Server(bench, os.path.join(CONFIGS, "llama-3.1-8b"), "--load-format", "dummy") as server:
        bench.figure(key + "/warm2/start_to_first_token_s", first_token(server))
        for tokens in (128, 1000, 8000):
            client(bench, "--in", tokens, "--out", 4, "--requests", 2, "--seed", 90)
            got = client(bench, "--in", tokens, "--out", 4, "--requests", 11, "--seed", 91 + tokens)
            bench.figure(f"{key}/best/ttft_ms/b1_{tokens}", got["ttft_p50_s"] * 1e3)
        got = client(bench, "--in", 912, "--out", 257, "--requests", 3, "--seed", 7)
        bench.figure(f"{key}/best/tpot_ms/b1_ctx1k", got["tpot_p50_s"] * 1e3)
        for c in (16, 64, 256):
            load(bench, key + "/best", c)
    start_from_file(bench)


# ---- from a file ----------------------------------------------------------------------------------------------------


def checkpoint(config, folder, device):
    """Random weights of this config.json as safetensors, a file a layer, and the smallest tokenizer: one id a byte."""
    import torch
    from safetensors.torch import save_file

    c = json.load(open(os.path.join(config, "config.json")))
    hidden, ffn, q = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"] * c["head_dim"]
    kv, vocab, index = c["num_key_value_heads"] * c["head_dim"], c["vocab_size"], {}

    def save(name, tensors):
        made = {}
        for key, shape in tensors.items():
            made[key] = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, shape[-1] ** -0.5).cpu()
            index[key] = name
        save_file(made, os.path.join(folder, name), metadata={"format": "pt"})

    save("ends.safetensors", {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden),
                              "model.norm.weight": (hidden,)})  # fmt: skip
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        save(f"layer{i}.safetensors", {
            at + "self_attn.q_proj.weight": (q, hidden), at + "self_attn.k_proj.weight": (kv, hidden),
            at + "self_attn.v_proj.weight": (kv, hidden), at + "self_attn.o_proj.weight": (hidden, q),
            at + "mlp.gate_proj.weight": (ffn, hidden), at + "mlp.up_proj.weight": (ffn, hidden),
            at + "mlp.down_proj.weight": (hidden, ffn), at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
        })  # fmt: skip
    json.dump({"weight_map": index}, open(os.path.join(folder, "model.safetensors.index.json"), "w"))
    c.update(bos_token_id=1, eos_token_id=2)
    json.dump(c, open(os.path.join(folder, "config.json"), "w"))
    visible = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    hidden_bytes = [b for b in range(256) if b not in visible]
    names = {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(hidden_bytes)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": level, "decoder": level,
                 "post_processor": None,
                 "model": {"type": "BPE", "vocab": {names[b]: b for b in range(256)}, "merges": []}}  # fmt: skip
    json.dump(tokenizer, open(os.path.join(folder, "tokenizer.json"), "w"))
    json.dump({"tokenizer_class": "PreTrainedTokenizerFast"}, open(os.path.join(folder, "tokenizer_config.json"), "w"))


def first_token(server):
    """Seconds from the start of the process to an answer of one token."""
    question = {"model": "bench", "prompt": [100, 101, 102], "max_tokens": 1, "temperature": 0}
    status, body = ask("POST", "/v1/completions", question)
    if status != 200:
        raise RuntimeError(f"the first request was answered with {status}: {body[:300]}")
    return time.monotonic() - server.begin


def start_from_file(bench, model="llama-3.1-8b", device="cuda"):
    """The files were just written, so they are in the page cache, as those of a server that is started again."""
    try:
        import torch, safetensors
    except ImportError as e:
        return print(f"skipped: start from safetensors: {e}")
    with tempfile.TemporaryDirectory(prefix="quire-start-") as folder:
        checkpoint(os.path.join(CONFIGS, model), folder, device)
        if device == "cuda":
            torch.cuda.empty_cache()
        for _ in range(2):
            with Server(bench, folder) as server:
                seconds = first_token(server)
        bench.figure(model + "/bf16/tp1/http/safetensors/start_to_first_token_s", seconds)


# ---- eight minutes --------------------------------------------------------------------------------------------------

SOAK_SECONDS, SOAK_CLIENTS = float(os.environ.get("QUIRE_SOAK_SECONDS", "480")), 96
# Between ready and the first sample: decode steps of up to 64 rows are recorded in a pause (11 of 10 ms each). From the
# second minute on nothing may change by a byte. Until then kernels of prompts' lengths are loaded by their first
# launch; more than this would eat into what the engine's plan leaves free.
SOAK_IDLE_SECONDS, SOAK_GROWTH_BYTES = 5, 128 << 20


class Nvml:
    """Bytes taken of the GPU, as the driver counts them."""

    class Memory(ctypes.Structure):
        _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]

    def __init__(self, ordinal=0):
        self.library, self.device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        self.ask("nvmlInit_v2")
        self.ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(ordinal), ctypes.byref(self.device))

    def ask(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} returned {code}")

    def used(self):
        memory = Nvml.Memory()
        self.ask("nvmlDeviceGetMemoryInfo", self.device, ctypes.byref(memory))
        return memory.used


def metric(text, name):
    return sum(float(v) for v in re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.M))


class Soaker(threading.Thread):
    """Requests of random lengths one behind the other; every fifth is left in the middle."""

    def __init__(self, seed, until):
        super().__init__(daemon=True)
        self.random, self.until = random.Random(seed), until
        self.done = self.left = self.wrong = 0
        self.last_error = ""

    def once(self):
        r = self.random
        prompt = [r.randrange(300, 128000) for _ in range(int(r.lognormvariate(5.5, 1.0)) % 4000 + 1)]
        body = {"model": "bench", "prompt": prompt, "max_tokens": r.randrange(16, 400), "ignore_eos": True,
                "stream": True, "temperature": r.choice([0, 0.7, 1.0])}  # fmt: skip
        leave = r.random() < 0.2
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {answer.read()[:200]}")
            if leave:
                answer.read(r.randrange(1, 4000))
                self.left += 1
                return
            text = answer.read()
            if b"[DONE]" not in text or b'"error"' in text:
                raise RuntimeError("a stream without an end: " + repr(text[-200:]))
            self.done += 1
        finally:
            connection.close()

    def run(self):
        while time.monotonic() < self.until:
            try:
                self.once()
            except Exception as e:
                self.wrong += 1
                self.last_error = f"{type(e).__name__}: {e}"
                time.sleep(0.2)


def soak(bench):
    key = "llama-3.1-8b/bf16/tp1/soak"
    model = os.path.join(CONFIGS, "llama-3.1-8b")
    nvml = Nvml()
    # With other tests beside it from the third minute to the last but one, memory is looked at before and after them.
    beside = os.environ.get("QUIRE_SOAK_BESIDE") == "1"
    share = ["--gpu-memory-utilization", "0.4"] if beside else []
    with Server(bench, model, "--load-format", "dummy", "--max-num-seqs", "64", *share):
        time.sleep(SOAK_IDLE_SECONDS)
        ready = nvml.used()
        print(f"ready: GPU memory {ready} bytes")
        until = time.monotonic() + SOAK_SECONDS
        soakers = [Soaker(i, until) for i in range(SOAK_CLIENTS)]
        for s in soakers:
            s.start()
        minute, samples, rates, last = SOAK_SECONDS / 8, [], [], None
        for n in range(9):
            if n:
                time.sleep(max(0.0, until - SOAK_SECONDS + n * minute - time.monotonic()))
            text = ask("GET", "/metrics")[1].decode()
            tokens = metric(text, r"[\w:]*generation_tokens_total")
            if last is not None:
                rates.append((tokens - last) / minute)
                if not beside or n in (1, 2, 8):
                    samples.append(nvml.used())
                print(f"minute {n}: {rates[-1]:.0f} tok/s, GPU memory {samples[-1]} bytes ({samples[-1] - ready:+d}), "
                      f"{sum(s.done for s in soakers)} done, {sum(s.left for s in soakers)} left")  # fmt: skip
            last = tokens
        for s in soakers:
            s.join(130)
        time.sleep(2)
        text = ask("GET", "/metrics")[1].decode()
        running = metric(text, r"[\w:]*num_requests_running")
    wrong = sum(s.wrong for s in soakers)
    change = rates[-1] / rates[1] - 1
    bench.figure(key + "/out_tok_s_second_minute", rates[1])
    bench.figure(key + "/out_tok_s_last_minute", rates[-1])
    bench.figure(key + "/requests_done", sum(s.done for s in soakers))
    cells = ["soak", f"{SOAK_SECONDS:.0f} s, {SOAK_CLIENTS} clients", f"{change:+.1%} from second to last minute"]
    bench.figure(key + "/gpu_memory_growth_bytes", max(samples) - ready)
    cells += [f"GPU memory {ready} bytes when ready, {min(samples)} to {max(samples)} then"]
    cells += [f"{wrong} failed", f"{running:g} left"]
    print("| " + " | ".join(cells) + " |")
    if wrong:
        raise RuntimeError(f"{wrong} requests failed, one of them: {max(s.last_error for s in soakers)}")
    if abs(change) > 0.03 or running:
        raise RuntimeError("the last minute is not as the second: see the table")
    if max(samples[1:]) != min(samples[1:]) or max(samples) - ready > SOAK_GROWTH_BYTES:
        raise RuntimeError("GPU memory is not constant: see the table")


# ---- keeping --------------------------------------------------------------------------------------------------------


def merge(log, part):
    text = open(log, errors="replace").read()
    figures = {m.group(1): float(m.group(2)) for m in re.finditer(r"^figure (\S+) (\S+)$", text, re.M)}
    if not figures:
        return
    kept = json.load(open(FIGURES)) if os.path.exists(FIGURES) else {}
    kept.update(figures)
    gpu, commit, date = (re.search(rf"^{word} (.*)$", text, re.M).group(1) for word in ("gpu", "commit", "date"))
    kept.setdefault("meta", {})[part] = {"date": date, "gpu": gpu, "commit": commit}
    with open(FIGURES, "w") as f:
        json.dump(dict(sorted(kept.items())), f, indent=1)
        f.write("\n")
    with open(os.path.join(ROOT, "tests/bench/SPEED.md"), "a") as f:
        f.write(f"\n## {date} · tests/gpu {part} ({gpu}, commit {commit})\n\n")
        f.write("\n".join(line for line in text.splitlines() if line.startswith("|")) + "\n")


def said(*command):
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip().split("\n")[0]
    except OSError:
        return ""


def where():
    """What is measured, and on what: for the merge, which may be done elsewhere."""
    print("gpu", said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"))
    print("commit", os.environ.get("QUIRE_COMMIT") or said("git", "rev-parse", "--short", "HEAD") or "unknown")
    print("date", datetime.date.today().isoformat(), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default=os.path.join(ROOT, "build"))
    parser.add_argument("--merge")
    parser.add_argument("--part")
    parser.add_argument("bench", nargs="?")
    args = parser.parse_args()
    if args.merge:
        return merge(args.merge, args.part)
    bench = Bench(args.build)
    benches = {"decode": decode, "prefill": prefill, "offline": offline, "http": over_http, "soak": soak,
               "comm": comm, "tp2": tp2, "tp2-http": tp2_http, "dp2": dp2, "dp2-routing": dp2_routing}
    if args.bench not in benches:
        parser.error("name one of " + ", ".join(benches))
    where()
    try:
        benches[args.bench](bench)
    finally:
        bench.table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
