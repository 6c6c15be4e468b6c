"""What the real binary says at the start about its device: refusals in one line with exit code 2, and how auto falls
back. Random weights from a config.json: no model file is needed. Standard library only.

QUIRE_TEST_DEVICE=cuda: on a machine with a GPU, its memory included (nvidia-smi must be there); elsewhere those are
skipped. QUIRE_BINARY: another binary than build/quire; the one of build-cuda is tested too where it was built."""

import json
import os
import re
import subprocess
import tempfile
import time
import unittest

from http_support import REAL, ROOT, Server

GPU = os.environ.get("QUIRE_TEST_DEVICE") == "cuda"
CUDA_BUILD = os.path.join(ROOT, "build-cuda", "quire")
BINARIES = [REAL] + ([CUDA_BUILD] if "QUIRE_BINARY" not in os.environ and os.path.exists(CUDA_BUILD) else [])
# 16 GB of bf16: an 8B model's shapes.
LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
SMALL = {
    **LARGE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


def environment(extra):
    return {**{k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}, **extra}


def folder_of(config):
    folder = tempfile.TemporaryDirectory(prefix="quire-start-")
    with open(os.path.join(folder.name, "config.json"), "w") as file:
        json.dump(config, file)
    return folder


def gpu_used_mib():
    out = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True
    ).stdout
    return int(out.split()[0])


class Start(unittest.TestCase):
    def refused(self, config, *flags, binary=REAL, **env):
        """Starts the binary, which must end by itself with exit code 2; the one line that it says beside its log."""
        with folder_of(config) as folder:
            command = [binary, "serve", folder, "--load-format", "dummy", "--port", "0", *flags]
            done = subprocess.run(command, env=environment(env), capture_output=True, text=True, timeout=120)
        said = [line for line in done.stderr.splitlines() if not line.startswith("time=")]
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(len(said), 1, done.stderr)
        self.assertNotIn('msg="ready"', done.stderr)
        return said[0]


@unittest.skipIf(GPU, "this machine has a GPU")
class WithoutGpu(Start):
    def test_cuda_is_refused(self):
        for binary in BINARIES:
            with self.subTest(binary=binary):
                for flags in (["--device", "cuda"], ["--device", "cuda:1"]):
                    line = self.refused(SMALL, *flags, binary=binary)
                    self.assertRegex(line, "^quire: --device: ")
                    self.assertRegex(line, "no NVIDIA driver|no GPU that it may use|no CUDA backend")
                    self.assertEqual(line.count("--device cpu"), 1, line)

    def test_auto_says_that_it_falls_back(self):
        """A build with CUDA gives the reason; a build without says that it has none."""
        for binary in BINARIES:
            with self.subTest(binary=binary), folder_of(SMALL) as folder:
                without = "no CUDA backend" in self.refused(SMALL, "--device", "cuda", binary=binary)
                command = [binary, "serve", folder, "--load-format", "dummy", "--port", "0", "--device", "auto"]
                command += ["--kv-cache-memory-bytes", "16M"]
                process = subprocess.Popen(command, env=environment({}), stderr=subprocess.PIPE, text=True)
                lines = []
                for line in process.stderr:
                    lines.append(line)
                    if 'msg="ready"' in line:
                        break
                process.terminate()
                process.stderr.read()
                process.stderr.close()
                self.assertEqual(process.wait(30), 0)
                log = "".join(lines)
                self.assertIn("kind=cpu", log)
                self.assertEqual(log.count('msg="no CUDA device, the CPU serves" why='), 1, log)
                self.assertEqual("this build has no CUDA backend" in log, without, log)


class CpuMemory(Start):
    """What the CPU's memory cannot hold is refused before it is taken, with the sum and what to change."""

    def setUp(self):
        with open("/proc/meminfo") as file:
            self.available_mib = int(re.search(r"MemAvailable: +(\d+) kB", file.read()).group(1)) >> 10

    def sum_of(self, config, *flags):
        line = self.refused(config, "--device", "cpu", *flags)
        found = re.search(r"weights (\d+) MiB \+ workspace (\d+) MiB \+ KV (\d+) MiB \(.*\) = (\d+) MiB", line)
        self.assertTrue(found, line)
        parts = [int(n) for n in found.groups()]
        self.assertLessEqual(abs(sum(parts[:3]) - parts[3]), 3, line)
        self.assertRegex(line, r"but \d+ MiB are free")
        return line

    def test_weights(self):
        width = int(self.available_mib / 512 * (1 << 20) / (3 * 4096 * 2)) // 64 * 64 + 64  # all layers: what is free
        large = {**LARGE, "num_hidden_layers": 512, "intermediate_size": width}
        for flags in ((), ("--kv-cache-memory-bytes", "16M")):
            line = self.sum_of(large, *flags)
            self.assertIn("the weights alone do not fit: take a smaller or quantised model", line)
            self.assertNotIn("--max-model-len", line)

    def test_pool_asked_for(self):
        line = self.sum_of(SMALL, "--kv-cache-memory-bytes", "%dM" % (self.available_mib + 1024))
        self.assertIn("take a smaller --kv-cache-memory-bytes", line)
        self.assertNotIn("--gpu-memory-utilization", line)

    def test_share(self):
        """A context of a twentieth of what is free fits, but not into a hundredth."""
        long = {**SMALL, "max_position_embeddings": 1 << 20, "num_hidden_layers": self.available_mib // 20 // 1024 + 1}
        line = self.sum_of(long, "--gpu-memory-utilization", "0.01")
        self.assertIn("take a larger --gpu-memory-utilization", line)

    def test_context(self):
        heads = {"num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 64, "num_hidden_layers": 64}
        line = self.sum_of({**SMALL, **heads, "max_position_embeddings": 1 << 20}, "--max-num-batched-tokens", "64")
        self.assertIn("take a smaller --max-model-len", line)


@unittest.skipUnless(GPU, "skipped: no GPU (QUIRE_TEST_DEVICE=cuda says that there is one)")
class WithGpu(Start):
    def setUp(self):
        self.before = gpu_used_mib()

    def tearDown(self):
        """What ended holds no memory of the GPU any more."""
        end = time.monotonic() + 10
        while gpu_used_mib() > self.before + 64 and time.monotonic() < end:
            time.sleep(0.2)
        self.assertLessEqual(gpu_used_mib(), self.before + 64)

    def arithmetic(self, line):
        """The sum that the line gives is one, and it says what to change."""
        sum_of = r"weights (\d+) MiB \+ workspace (\d+) MiB \+ CUDA itself (\d+) MiB \+ KV (\d+) MiB .*= (\d+) MiB"
        found = re.search(sum_of, line)
        self.assertTrue(found, line)
        parts = [int(n) for n in found.groups()]
        self.assertLessEqual(abs(sum(parts[:4]) - parts[4]), 4, line)  # each is rounded down
        self.assertIn("take ", line)
        return parts

    def test_too_little_for_the_weights(self):
        line = self.refused(LARGE, "--device", "cuda", "--gpu-memory-utilization", "0.05")
        weights = self.arithmetic(line)[0]
        self.assertGreater(weights, 15000)
        self.assertIn("--gpu-memory-utilization", line)

    def test_too_little_for_one_context(self):
        """The weights fit, one sequence of the length asked for does not."""
        long = {**LARGE, "max_position_embeddings": 1 << 20}  # 128 KiB a token: 128 GiB
        line = self.refused(long, "--device", "cuda", "--max-model-len", str(1 << 20))
        self.assertGreater(self.arithmetic(line)[3], 100000)
        self.assertIn("--max-model-len", line)

    def test_taken_by_another(self):
        """A server that took its 92 % leaves too little for a second one, which says how much is free."""
        with folder_of(SMALL) as folder:
            with Server("--load-format", "dummy", model=folder) as first:
                line = self.refused(LARGE, "--device", "cuda")
                self.arithmetic(line)
                self.assertRegex(line, r"\d+ MiB are free")
                body = {"model": "default", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
                self.assertEqual(first.post("/v1/completions", json.dumps(body)).status, 200)  # and goes on itself

    def test_no_such_device(self):
        self.assertIn("there is no CUDA device 99", self.refused(SMALL, "--device", "cuda:99"))

    def test_hidden_device(self):
        line = self.refused(SMALL, "--device", "cuda", CUDA_VISIBLE_DEVICES="")
        self.assertIn("no GPU that it may use", line)

    def test_auto_falls_back(self):
        with folder_of(SMALL) as folder:
            hidden = {"CUDA_VISIBLE_DEVICES": ""}
            flags = ("--load-format", "dummy", "--device", "auto", "--kv-cache-memory-bytes", "16M")
            with Server(*flags, env=hidden, model=folder) as server:
                log = "".join(server.lines)
                self.assertIn('msg="no CUDA device, the CPU serves" why=', log)
                self.assertIn("kind=cpu", log)

    def test_auto_takes_it(self):
        with folder_of(SMALL) as folder:
            flags = ("--load-format", "dummy", "--device", "auto", "--gpu-memory-utilization", "0.2")
            with Server(*flags, model=folder) as server:
                self.assertIn("kind=cuda", "".join(server.lines))


if __name__ == "__main__":
    unittest.main(verbosity=2)
