#!/usr/bin/env python3
"""Quire's logits beside transformers', on random-initialised Llama checkpoints with real shapes.

usage: tests/gpu_differential.py [--build DIR] [--device cuda|cpu] [--models 1b,8b4,...] [--kernels sm_90a,portable]
                                 [--tensor-parallel-size N]
                                 [--tiny] [--keep DIR]

Each checkpoint is made with torch in bf16, saved as safetensors, and run by build/tools/model_logits through a script
of steps: prefill, chunked prefill, decode, many decodes at once, mixed batches, a prefix hit, a recompute after
preemption, and a fixed token sequence scored. transformers runs every sequence of the script in one pass, twice: in
bf16, and with the same weights in f32. In f32 lies the truth; transformers' own bf16 error says what bf16 costs; ours
may be no more than SLACK times that, over each kind of step. The perplexity must be within 0.1 % of transformers' in
bf16.

Prints a line for each kind of step and a last line "differential: N passed, M failed". Exit code 1 when one failed.
--tiny makes checkpoints of a few MB, which a machine without a GPU can compare too (--device cpu).
"""

import argparse, math, os, random, subprocess, sys, tempfile, time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SLACK = 1.25  # of the root mean square; a rounding more or less in another place moves it by some percent
# Logits of deviation 0.5, of which bf16 costs 3 %: a token's log-probability is off by 0.015, the mean over 8 * 1024 by
# 0.017 %, and two such implementations differ by 0.1 % once in thousands of times.
LOGITS_DEVIATION, TEXTS = 0.5, 8
SLACK_WORST = 2.0  # of the largest single difference among some million values

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS = {
    # Llama-3.2-1B's shape, all 16 layers, output tied to the embedding.
    "1b": dict(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, vocab_size=128256, tie_word_embeddings=True, rope=LLAMA3_ROPE,
    ),
    # Llama-3.1-8B's, 4 layers, untied.
    "8b4": dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=128256, tie_word_embeddings=False, rope=dict(LLAMA3_ROPE, factor=8.0),
    ),
    # TinyLlama's: 32 heads on 4, plain rope, a vocabulary of 32000.
    "1b-plain": dict(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=6, num_attention_heads=32, num_key_value_heads=4,
        head_dim=64, vocab_size=32000, tie_word_embeddings=False, rope=None,
    ),
}
TINY = dict(hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
            head_dim=32, vocab_size=1000)  # fmt: skip


# ---- the checkpoint -------------------------------------------------------------------------------------------------


def checkpoint_make(shape, folder, device, seed):
    """A model of this shape in bf16 with weights that make attention and norms matter; saved to the folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(shape)
    rope = shape.pop("rope", None)
    theta = 500000.0 if rope else 10000.0
    config = LlamaConfig(
        max_position_embeddings=131072 if rope else 4096, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
        rope_parameters=dict(rope or {"rope_type": "default"}, rope_theta=theta), **shape,
    )  # fmt: skip
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_(1.0 + 0.2 * torch.randn(p.shape, device=device))
            elif "q_proj" in name or "k_proj" in name:
                p.normal_(0.0, 1.5 / math.sqrt(p.shape[1]))
            elif "embed" in name and not shape["tie_word_embeddings"]:
                p.normal_(0.0, 0.5)
            elif "embed" in name or "lm_head" in name:
                p.normal_(0.0, LOGITS_DEVIATION / math.sqrt(p.shape[1]))
            else:
                p.normal_(0.0, 1.0 / math.sqrt(p.shape[1]))
    model.eval()
    model.save_pretrained(folder, safe_serialization=True)
    return model


# ---- the script -----------------------------------------------------------------------------------------------------


class Script:
    """Lines for model_logits, and for each row of logits the kind of step, the sequence and the position it is of."""

    def __init__(self, vocab, seed):
        self.lines, self.rows, self.sequences, self.texts, self.vocab = [], [], [], [], vocab
        self.random = random.Random(seed)

    def sequence(self, count, prefix=()):
        ids = list(prefix) + [self.random.randrange(3, self.vocab) for _ in range(count - len(prefix))]
        self.sequences.append(ids)
        return len(self.sequences) - 1

    def feed(self, kind, slot, sequence, start, count, wants):
        ids = self.sequences[sequence][start : start + count]
        assert len(ids) == count
        self.lines.append(f"feed {slot} {start} {wants} " + " ".join(map(str, ids)))
        self.rows += [(kind, sequence, start + count - wants + i) for i in range(wants)]

    def step(self):
        self.lines.append("step")

    def line(self, text):
        self.lines.append(text)


def script_make(vocab, scored):
    s = Script(vocab, 7)
    a, b, c = s.sequence(640), s.sequence(300), s.sequence(700)
    d = s.sequence(500, prefix=s.sequences[a][:256])
    # A whole prompt in one step, then token by token.
    s.feed("prefill", 0, a, 0, 512, 32), s.step()
    for i in range(512, 544):
        s.feed("decode", 0, a, i, 1, 1), s.step()
    # The same tokens in chunks that end anywhere in a page.
    at = 0
    for count in (100, 1, 63, 64, 130, 7, 147):
        s.feed("chunked prefill", 1, a, at, count, 1), s.step()
        at += count
    # Prefill, chunks and decodes in one step.
    s.feed("mixed", 0, a, 544, 1, 1), s.feed("mixed", 2, b, 0, 200, 8), s.feed("mixed", 1, a, 512, 3, 1), s.step()
    s.feed("mixed", 0, a, 545, 1, 1), s.feed("mixed", 2, b, 200, 90, 8), s.feed("mixed", 3, c, 0, 400, 8)
    s.feed("mixed", 1, a, 515, 1, 1), s.step()
    for i in range(4):
        s.feed("mixed", 0, a, 546 + i, 1, 1), s.feed("mixed", 2, b, 290 + i, 1, 1)
        s.feed("mixed", 3, c, 400 + 50 * i, 50, 2), s.step()
    # Four full pages of 64 of another sequence, the rest prefilled on top of them.
    s.line("share 0 4 4")
    s.feed("prefix hit", 4, d, 256, 200, 16), s.step()
    for i in range(456, 464):
        s.feed("prefix hit", 4, d, i, 1, 1), s.feed("decode", 0, a, 94 + i, 1, 1), s.step()
    # Preempted: all of it again, in other pages, then on.
    s.line("forget 3")
    s.feed("preempted", 3, c, 0, 620, 16), s.step()
    for i in range(620, 628):
        s.feed("preempted", 3, c, i, 1, 1), s.step()
    # Many decodes at once, of lengths that differ; every bucket up to 64 sequences.
    many = [s.sequence(40 + 5 * i) for i in range(64)]
    for begin in range(0, 64, 16):
        for i in range(begin, begin + 16):
            s.feed("prefill of many", 10 + i, many[i], 0, 16 + 5 * i, 1)
        s.step()
    for t, live in enumerate((64, 64, 40, 17, 8, 5, 3, 2)):
        for i in range(live):
            s.feed("decode of many", 10 + i, many[i], 16 + 5 * i + t, 1, 1)
        s.step()
    for _ in range(TEXTS):
        text = s.sequence(scored)
        s.texts.append(text)
        s.line("score 5 " + " ".join(map(str, s.sequences[text])))
        s.line("forget 5")
    return s


# ---- both sides -----------------------------------------------------------------------------------------------------


def ours(args, folder, script, kernels, work):
    import torch

    lines, out = os.path.join(work, "script"), os.path.join(work, "logits")
    with open(lines, "w") as f:
        f.write("\n".join(script.lines) + "\n")
    command = [os.path.join(args.build, "tools", "model_logits"), folder, lines, out, "--device", args.device]
    command += ["--tokens", "8192", "--kv", "bf16" if args.device == "cuda" else "f32"]
    if args.tensor_parallel_size > 1:
        command += ["--tensor-parallel-size", str(args.tensor_parallel_size)]
    if kernels:
        command += ["--kernels", kernels]
    r = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if r.returncode:
        raise RuntimeError(f"model_logits ended with {r.returncode}: {r.stderr.strip()[-800:]}")
    lines = [line.split() for line in r.stdout.splitlines()]
    rows, vocab = next((int(words[1]), int(words[3])) for words in lines if words[0] == "rows")
    scores = [float(words[1]) for words in lines if words[0] == "nll"]
    assert len(scores) == len(script.texts)
    assert rows == len(script.rows), f"{rows} rows, not {len(script.rows)}"
    logits = torch.frombuffer(bytearray(open(out, "rb").read()), dtype=torch.float32).reshape(rows, vocab)
    os.unlink(out)
    return logits.to(args.device), sum(scores) / len(scores)


def theirs(model, script, device):
    """Logits [rows, vocab] f32 of the script's rows, and the mean negative log-probability of its texts."""
    import torch

    wanted = {}
    for row, (_, sequence, position) in enumerate(script.rows):
        wanted.setdefault(sequence, []).append((row, position))
    out = torch.empty(len(script.rows), model.config.vocab_size, dtype=torch.float32, device=device)
    with torch.no_grad():
        for sequence, places in wanted.items():
            last = max(position for _, position in places)
            ids = torch.tensor([script.sequences[sequence][: last + 1]], device=device)
            hidden = model.model(ids).last_hidden_state[0]
            picked = hidden[torch.tensor([p for _, p in places], device=device)]
            out[torch.tensor([row for row, _ in places], device=device)] = model.lm_head(picked).float()
        total = 0.0
        for text in script.texts:
            ids = torch.tensor([script.sequences[text]], device=device)
            hidden = model.model(ids).last_hidden_state[0]
            for begin in range(0, ids.shape[1] - 1, 128):
                wanted = ids[0, begin + 1 : begin + 129]
                logits = model.lm_head(hidden[begin : begin + len(wanted)]).float()
                total += torch.nn.functional.cross_entropy(logits, wanted).item() * len(wanted)
    return out, total / sum(len(script.sequences[text]) - 1 for text in script.texts)


# ---- the comparison -------------------------------------------------------------------------------------------------


class Verdict:
    def __init__(self):
        self.passed = self.failed = 0

    def say(self, good, text):
        self.passed += good
        self.failed += not good
        print(("ok    " if good else "WRONG ") + text, flush=True)


def compare(verdict, label, script, got, bf16, f32):
    """All [rows, vocab] f32 on one device."""
    kinds = {}
    for row, (kind, _, _) in enumerate(script.rows):
        kinds.setdefault(kind, []).append(row)
    for kind, rows in kinds.items():
        truth = f32[rows].double()
        scale = truth.std().item()
        errors = []
        for logits in (got, bf16):
            off = (logits[rows].double() - truth) / scale
            errors.append((off.square().mean().sqrt().item(), off.abs().max().item(),
                           off.square().mean(dim=1).sqrt().max().item()))  # fmt: skip
        (rms, worst, row), (rms_theirs, worst_theirs, row_theirs) = errors
        good = math.isfinite(rms) and rms <= SLACK * rms_theirs + 1e-6
        # The worst of single values, and a single row that is garbage.
        good = good and worst <= SLACK_WORST * worst_theirs + 1e-5 and row <= SLACK_WORST * row_theirs + 1e-5
        verdict.say(
            good,
            f"{label:<16} {kind:<16} {len(rows):4d} rows, error/deviation of logits: rms {rms:.5f} (theirs in bf16 "
            f"{rms_theirs:.5f}), worst {worst:.4f} ({worst_theirs:.4f}), of a row {row:.5f} ({row_theirs:.5f})",
        )


def perplexities(verdict, label, nll, nll_bf16, nll_f32):
    ratio = math.exp(nll - nll_bf16) - 1
    text = f"{label:<16} perplexity {math.exp(nll):.3f}, transformers bf16 {math.exp(nll_bf16):.3f} ({ratio:+.4%}), "
    text += f"f32 {math.exp(nll_f32):.3f} (ours {math.exp(nll - nll_f32) - 1:+.4%}, "
    text += f"theirs in bf16 {math.exp(nll_bf16 - nll_f32) - 1:+.4%})"
    verdict.say(abs(ratio) <= 1e-3, text)


def one_model(args, verdict, name, work):
    import torch

    shape = dict(MODELS[name])
    if args.tiny:
        shape.update(TINY)
    folder = os.path.join(work, name)
    began = time.monotonic()
    model = checkpoint_make(shape, folder, args.device, 11)
    made = time.monotonic() - began
    script = script_make(shape["vocab_size"], 129 if args.tiny else 1025)
    bf16, nll_bf16 = theirs(model, script, args.device)
    model = model.float()
    f32, nll_f32 = theirs(model, script, args.device)
    del model
    if args.device == "cuda":
        torch.cuda.empty_cache()
    theirs_s = time.monotonic() - began - made
    for kernels in args.kernels.split(",") if args.device == "cuda" else [None]:
        label = f"{name} {kernels or 'cpu'}"
        began = time.monotonic()
        try:
            got, nll = ours(args, folder, script, kernels, work)
        except Exception as e:
            verdict.say(False, f"{label}: {e}")
            continue
        print(f"{label}: made in {made:.1f} s, transformers {theirs_s:.1f} s, quire {time.monotonic() - began:.1f} s")
        compare(verdict, label, script, got, bf16, f32)
        perplexities(verdict, label, nll, nll_bf16, nll_f32)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default=os.path.join(ROOT, "build"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="1b,8b4,1b-plain")
    parser.add_argument("--kernels", default="sm_90a,portable")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--keep")
    args = parser.parse_args()
    try:
        import torch, transformers
    except ImportError as e:
        print(f"skipped: {e}")
        return 77
    if args.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    transformers.utils.logging.disable_progress_bar()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    verdict = Verdict()
    with tempfile.TemporaryDirectory(prefix="quire-differential-", dir=args.keep) as work:
        for name in args.models.split(","):
            one_model(args, verdict, name, work)
    print(f"differential: {verdict.passed} passed, {verdict.failed} failed")
    return 1 if verdict.failed else 0


if __name__ == "__main__":
    sys.exit(main())
