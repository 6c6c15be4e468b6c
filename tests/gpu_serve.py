#!/usr/bin/env python3
"""The server on a GPU, with the default model: that it is there, and what --batch-invariant promises.

usage: tests/gpu_serve.py [--build DIR] device|invariant|apart|replicas|faults|fit
  device     starts with --device cuda, says so, answers
  invariant  a request alone and among 255 others: the same tokens with --batch-invariant; also of a bf16 model with
             random weights, without and with part of the prompt from the prefix cache
  apart      the same without it: no answer is garbage (greedy tokens are ones that the model thought likely)
  replicas   two GPUs, a replica on each: the reference answers from both, then 10,000 requests of which a third are
             left half-way, and nothing is held on either GPU afterwards
  faults     two GPUs: engines killed and stopped under load, the front killed, SIGTERM while starting, a rank whose
             device call fails; each five times; what clients see, how soon, and that nothing is left
  fit        a model of 70B: refused on one GPU within a second, naming two; answers over two
"""

import argparse, concurrent.futures, http.client, json, os, random, re, signal, subprocess, sys
import tempfile, threading, time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODEL = os.environ.get("QUIRE_TEST_MODEL") or os.path.join(
    os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "quire", "SmolLM2-135M-Instruct.Q4_1.gguf"
)
CONFIG, LAYERS = os.path.join(ROOT, "tests/bench/configs/llama-3.2-1b/config.json"), 4
QUESTION = {"model": "m", "temperature": 0, "max_tokens": 48, "logprobs": 1}
IDS_QUESTION = {"model": "m", "temperature": 0, "max_tokens": 48, "ignore_eos": True, "return_token_ids": True}


class Server:
    def __init__(self, build, *flags, model=MODEL):
        command = [os.path.join(build, "quire"), "serve", model, "--device", "cuda", "--port", "0", *flags]
        command += ["--served-model-name", "m"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.lines, self.ready = [], threading.Event()
        threading.Thread(target=self.read, daemon=True).start()
        self.ready.wait(60)
        found = re.search(r"address=\S+:(\d+)", "".join(self.lines))
        if self.process.poll() is not None or not found:
            raise RuntimeError("the server did not start:\n" + "".join(self.lines[-20:]))
        self.port = int(found.group(1))

    def read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            if 'msg="ready"' in line:
                self.ready.set()
        self.ready.set()

    def ask(self, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {text[:300]}")
            return json.loads(text)
        finally:
            connection.close()

    def complete(self, prompt):
        choice = self.ask(dict(QUESTION, prompt=prompt))["choices"][0]
        return choice["text"], choice["logprobs"]["token_logprobs"]

    def ids(self, prompt):
        """The answer's ids, and how many tokens of the prompt came from the cache."""
        answer = self.ask(dict(IDS_QUESTION, prompt=prompt))
        return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        if code:
            raise RuntimeError(f"the server ended with {code}:\n" + "".join(self.lines[-20:]))


def prompts():
    """256 of them, of lengths that differ; the first is the one that is watched."""
    golden = [json.loads(line) for line in open(os.path.join(ROOT, "tests/golden/smollm2.jsonl"))]
    ids = [g["prompt_ids"] for g in golden]
    return [ids[0]] + [ids[i % len(ids)][: 5 + 7 * (i % 29)] for i in range(1, 256)]


def device(build):
    server = Server(build)
    said = "".join(server.lines)
    text, _ = server.complete("The capital of France is")
    server.close()
    if "cuda" not in said.lower():
        raise RuntimeError("nothing was said of CUDA:\n" + said)
    if "Paris" not in text:
        raise RuntimeError(f"the answer is {text!r}")
    print("".join(line for line in server.lines if "cuda" in line.lower()).strip())
    print(f"answer: {text!r}")


def beside(server):
    """The watched request alone, then with all others at the same time."""
    asked = prompts()
    alone = server.complete(asked[0])
    with concurrent.futures.ThreadPoolExecutor(256) as pool:
        answers = list(pool.map(server.complete, asked))
    return alone, answers


def invariant(build):
    server = Server(build, "--batch-invariant", "--max-num-seqs", "256", "--no-enable-prefix-caching")
    alone, answers = beside(server)
    server.close()
    if answers[0] != alone:
        raise RuntimeError(f"alone: {alone}\namong others: {answers[0]}")
    print(f"the same {len(alone[1])} tokens and log-probabilities alone and among 255 others")
    with tempfile.TemporaryDirectory(prefix="quire-invariant-") as folder:
        config = dict(json.load(open(CONFIG)), num_hidden_layers=LAYERS)
        json.dump(config, open(os.path.join(folder, "config.json"), "w"))
        for caching in "--no-enable-prefix-caching", "--enable-prefix-caching":
            invariant_bf16(build, folder, config["vocab_size"], caching)


def invariant_bf16(build, folder, vocab, caching):
    """The watched prompt is of 300 tokens: with caching its pages are there when it is asked again."""
    r = random.Random(1)
    asked = [[r.randrange(vocab) for _ in range(300 if i == 0 else 5 + 7 * (i % 29))] for i in range(256)]
    flags = ["--load-format", "dummy", "--batch-invariant", "--max-num-seqs", "256", "--max-model-len", "2048", caching]
    server = Server(build, *flags, model=folder)
    alone, cached = server.ids(asked[0])
    with concurrent.futures.ThreadPoolExecutor(256) as pool:
        among, hit = list(pool.map(server.ids, asked))[0]
    server.close()
    if cached or bool(hit) != (caching == "--enable-prefix-caching"):
        raise RuntimeError(f"{caching}: {cached} tokens of the first prompt were cached, {hit} of the second")
    if len(alone) != IDS_QUESTION["max_tokens"] or len(set(alone)) < 4 or among != alone:
        raise RuntimeError(f"{caching}: alone: {alone}\namong others: {among}")
    print(f"bf16: the same {len(alone)} tokens alone and among 255 others, {hit} tokens of the prompt cached")


def apart(build):
    server = Server(build, "--max-num-seqs", "256", "--no-enable-prefix-caching")
    alone, answers = beside(server)
    server.close()
    same = os.path.commonprefix([alone[0], answers[0][0]])
    print(f"alone and among 255 others: {len(same)} of {len(alone[0])} characters are the same")
    for text, logprobs in answers:
        if len(logprobs) >= 8 and sum(logprobs) / len(logprobs) < -4:
            raise RuntimeError(f"garbage: {text!r} {logprobs}")


def scraped(server, name):
    """The values of a metric, by engine."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return {e: float(v) for e, v in re.findall(rf'^{name}{{[^}}]*engine="(\d+)"[^}}]*}} (\S+)$', text, re.M)}


def reference_check(server):
    """As far as the first step at which rounding to bf16 may choose another token (tests/golden/README.md)."""
    golden = [json.loads(line) for line in open(os.path.join(ROOT, "tests/golden/smollm2.jsonl"))]
    for g in golden * 2:  # twice, so that each replica gets its share
        body = {"model": "m", "prompt": g["prompt_ids"], "temperature": 0, "max_tokens": len(g["greedy_ids"]),
                "return_token_ids": True}  # fmt: skip
        got = server.ask(body)["choices"][0]["token_ids"]
        sure = next((i for i, m in enumerate(g["margins"]) if m < 0.25), len(g["greedy_ids"]))
        if got[:sure] != g["greedy_ids"][:sure]:
            raise RuntimeError(f"{g['name']}: {got[:sure]}, not {g['greedy_ids'][:sure]}")
    print(f"{len(golden)} reference answers, twice")


def one_of_many(server, seed):
    r = random.Random(seed)
    leave = r.random() < 0.33
    body = {"model": "m", "prompt": [r.randrange(20, 40000) for _ in range(r.randrange(1, 120))], "stream": True,
            "max_tokens": r.randrange(1, 48), "ignore_eos": True, "temperature": 0.8,
            "n": r.choice([1, 1, 1, 3])}  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if leave:
            answer.read(r.randrange(1, 600))
            return "left"
        text = answer.read()
        return "done" if answer.status == 200 and b"[DONE]" in text and b'"error"' not in text else repr(text[-200:])
    finally:
        connection.close()


def replicas(build):
    server = Server(build, "--data-parallel-size", "2")
    reference_check(server)
    with concurrent.futures.ThreadPoolExecutor(128) as pool:
        ends = list(pool.map(lambda seed: one_of_many(server, seed), range(10000)))
    wrong = [e for e in ends if e not in ("done", "left")]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of 10000 went wrong, one of them: {wrong[0]}")
    for _ in range(100):
        held = {name: scraped(server, name) for name in ("vllm:num_requests_running", "vllm:num_requests_waiting",
                                                        "vllm:kv_cache_usage_perc")}  # fmt: skip
        if all(set(by.values()) == {0.0} for by in held.values()):
            break
        time.sleep(0.1)
    else:
        raise RuntimeError(f"something is still held: {held}")
    served = scraped(server, "vllm:generation_tokens_total")
    if set(served) != {"0", "1"} or min(served.values()) < 0.3 * sum(served.values()):
        raise RuntimeError(f"tokens by replica: {served}")
    server.close()
    print(f"10000 requests, {ends.count('left')} left half-way; tokens by replica: {served}; nothing held")


# ---- faults ---------------------------------------------------------------------------------------------------------

FAULT_TIMES = 5


def pids(server):
    """The engines' processes, by replica, as the log last named them."""
    found = re.findall(r'msg="engine up" replica=(\d+) pid=(\d+)', "".join(server.lines))
    return {int(replica): int(pid) for replica, pid in found}


def until(condition, seconds, what):
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > seconds:
            raise RuntimeError(f"{what}: not within {seconds} s")
        time.sleep(0.005)
    return time.monotonic() - begin


def gone(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def gpu_used():
    """MiB taken of each GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(used) for used in subprocess.run(command, capture_output=True, text=True).stdout.split()]


def gpu_free(base):
    return all(now <= before + 16 for now, before in zip(gpu_used(), base))


def stream_end(server, tokens=400):
    """"done", "told" (an error in the stream) or what else came of one, and when it ended."""
    body = {"model": "m", "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        told, done = b'"error"' in text or answer.status == 503, b"[DONE]" in text
        return "told" if told else "done" if done else repr(text[-80:]), time.monotonic()
    except (OSError, http.client.HTTPException) as e:
        return repr(e), time.monotonic()
    finally:
        connection.close()


def struck(server, number, seconds):
    """One of two engines gets a signal under load: how soon that is noticed, its streams told, and it is back."""
    victim, others = 0, 1
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        streams = [pool.submit(stream_end, server) for _ in range(32)]
        time.sleep(0.15)
        pid, other = pids(server)[victim], pids(server)[others]
        lines = len(server.lines)
        begin = time.monotonic()
        os.kill(pid, number)
        noticed = until(lambda: any("the engine died" in line for line in server.lines[lines:]), seconds, "noticed")
        ends = [s.result() for s in streams]
    wrong = [e for e, _ in ends if e not in ("done", "told")]
    told = [t - begin for e, t in ends if e == "told"]
    if wrong or (told and max(told) > seconds + 1):
        raise RuntimeError(f"streams: {wrong}, told after {told}")
    back = until(lambda: pids(server)[victim] != pid, 20, "up again")
    if pids(server)[others] != other or gone(other):
        raise RuntimeError("the other engine did not live on")
    if stream_end(server, 8)[0] != "done":
        raise RuntimeError("no answer afterwards")
    return noticed, len(told), time.monotonic() - begin, back


def faults(build):
    base = gpu_used()
    server = Server(build, "--data-parallel-size", "2", "--routing-policy", "round-robin")
    for number, seconds in ((signal.SIGKILL, 0.5), (signal.SIGSTOP, 2.5)):
        for _ in range(FAULT_TIMES):
            noticed, told, whole, _ = struck(server, number, seconds)
            print(f"{number.name}: noticed after {noticed:.3f} s, {told} streams told, all well after {whole:.2f} s")
    server.close()
    until(lambda: gpu_free(base), 10, "GPU memory given back")
    for _ in range(FAULT_TIMES):  # the front
        server = Server(build, "--data-parallel-size", "2")
        children = list(pids(server).values())
        server.process.kill()
        server.process.wait()
        took = until(lambda: all(gone(pid) for pid in children), 5, "the engines end with their front")
        print(f"front killed: its engines were gone after {took:.3f} s")
    until(lambda: gpu_free(base), 10, "GPU memory given back")
    for _ in range(FAULT_TIMES):  # start-up
        command = [os.path.join(build, "quire"), "serve", MODEL, "--device", "cuda", "--port", "0",
                   "--data-parallel-size", "2"]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(random.uniform(0.02, 1.2))
        process.terminate()
        if process.wait(10) != 0:
            raise RuntimeError(f"SIGTERM while starting: exit code {process.returncode}")
    until(lambda: gpu_free(base), 10, "GPU memory given back")
    print(f"SIGTERM while starting: {FAULT_TIMES} times nothing left")
    rank_faults(build)
    until(lambda: gpu_free(base), 10, "GPU memory given back")


def rank_faults(build):
    """A device call of one of two ranks fails in step 40: the engine ends, its stream is told, a new one serves."""
    with tempfile.TemporaryDirectory(prefix="quire-faults-") as folder:
        config = dict(json.load(open(CONFIG)), num_hidden_layers=LAYERS)
        json.dump(config, open(os.path.join(folder, "config.json"), "w"))
        os.environ["QUIRE_FAULT"] = "rank:1,step:40"
        server = Server(build, "--load-format", "dummy", "--tensor-parallel-size", "2", model=folder)
        del os.environ["QUIRE_FAULT"]
        for _ in range(FAULT_TIMES):
            pid, lines = pids(server)[0], len(server.lines)
            end, _ = stream_end(server)
            noticed = until(lambda: any("the engine died" in line for line in server.lines[lines:]), 1, "noticed")
            if end != "told":
                raise RuntimeError(f"the stream of a failed rank ended with {end}")
            back = until(lambda: pids(server)[0] != pid, 20, "up again")
            print(f"rank failed: the stream was told, noticed {noticed:.3f} s later, up again after {back:.2f} s")
        server.close()


def fit(build):
    model = os.path.join(ROOT, "tests/bench/configs/llama-3.1-70b")
    command = [os.path.join(build, "quire"), "serve", model, "--device", "cuda", "--port", "0"]
    command += ["--load-format", "dummy"]
    begin = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    seconds = time.monotonic() - begin
    said = ended.stderr.strip().split("\n")[-1]
    print(f"{seconds:.2f} s, exit code {ended.returncode}: {said}")
    if ended.returncode != 2 or seconds > 1 or "--tensor-parallel-size 2" not in said:
        raise RuntimeError("not refused as it should be")
    server = Server(build, "--load-format", "dummy", "--tensor-parallel-size", "2", model=model)
    ids, _ = server.ids([1, 2, 3])
    server.close()
    print(f"over two: {len(ids)} tokens")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default=os.path.join(ROOT, "build"))
    parser.add_argument("what", choices=["device", "invariant", "apart", "replicas", "faults", "fit"])
    args = parser.parse_args()
    if not os.path.exists(MODEL):
        print(f"skipped: no model at {MODEL}")
        return 77
    for part in (device, invariant, apart, replicas, faults, fit):
        if part.__name__ == args.what:
            part(args.build)
    return 0


if __name__ == "__main__":
    sys.exit(main())
