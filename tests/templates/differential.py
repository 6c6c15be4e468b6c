#!/usr/bin/env python3
"""Compares Quire's template interpreter with Jinja2, and writes down what Jinja2 says.

  differential.py build/tools/jinja_render             compare (needs the jinja2 package)
  differential.py build/tools/jinja_render --write     also write expected.jsonl, from which tests/unit/test_jinja.c runs alone
  differential.py build/tools/jinja_render --more DIR  also render every *.jinja file of DIR with each conversation

The other side is set up as transformers sets it up: ImmutableSandboxedEnvironment, trim_blocks, lstrip_blocks, loop
controls, generation blocks, tojson without escaping, raise_exception, strftime_now.
"""
import argparse
import datetime
import json
import os
import subprocess
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

HERE = os.path.dirname(os.path.abspath(__file__))
VARS = {
    "s": "hello", "u": "aé😀b", "l": [1, 2, 3, 4, 5], "flag": True, "nothing": None, "big": 12345678901, "pi": 3.25,
    "neg": -7, "zero": 0,
    "d": {"a": 1, "list": ["x", "y"], "nested": {"x": "deep"}, "b": None, "é": "\"q\""},
    "people": [{"name": "Ann", "age": 34}, {"name": "Bob", "age": 28}, {"name": "Cid", "age": 34}],
    "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi <|im_end|> there"},
                 {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why?"}],
}
TRUSTED = {"bos_token": "<s>", "eos_token": "</s>"}
NOW = datetime.datetime(2024, 7, 26, 0, 0, 0)  # the time that jinja_render tells, in UTC


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    return env


def oracle(env, case):
    try:
        return {"out": env.from_string(case["template"]).render(**case["vars"], **case["trusted"])}
    except Exception as e:  # noqa: BLE001: whatever it is, ours must refuse too
        return {"error": str(e)}


def cases_of_expressions():
    with open(os.path.join(HERE, "expressions.txt"), encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            line = line.rstrip("\n")
            if not line or line.startswith("# "):
                continue
            # \n, \r and \t outside of string literals stand for the characters; within them Jinja reads them itself.
            outside = "{{" not in line.split("\\n")[0] or line.startswith(("{{ 'a' }}\\n", "{{- "))
            if not line.startswith("{{") or outside:
                line = line.replace("\\r", "\r").replace("\\n", "\n")
            yield {"name": f"expressions:{number}", "template": line, "vars": VARS, "trusted": TRUSTED}


def cases_of_templates(folder, conversations):
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".jinja"):
            continue
        with open(os.path.join(folder, name), encoding="utf-8", newline="") as f:
            source = f.read()
        for talk, variables in conversations.items():
            yield {"name": f"{name}:{talk}", "template": source, "file": name, "conversation": talk, "vars": variables,
                   "trusted": TRUSTED}


def run_ours(tool, cases):
    lines = "".join(json.dumps({k: c[k] for k in ("template", "vars", "trusted")}) + "\n" for c in cases)
    reply = subprocess.run([tool], input=lines.encode(), stdout=subprocess.PIPE, check=True, timeout=300,
                           env={**os.environ, "TZ": "UTC"})
    return [json.loads(line) for line in reply.stdout.splitlines()]


def expected_line(case, want):
    line = {"name": case["name"]}
    if "file" in case:
        line.update(file=case["file"], conversation=case["conversation"])
    else:
        line.update(template=case["template"])
    line.update({"out": want["out"]} if "out" in want else {"error": True})
    return json.dumps(line, ensure_ascii=False)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tool")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--more")
    args = parser.parse_args()
    with open(os.path.join(HERE, "conversations.json"), encoding="utf-8") as f:
        conversations = json.load(f)
    cases = list(cases_of_expressions()) + list(cases_of_templates(HERE, conversations))
    own = len(cases)
    if args.more:
        cases += cases_of_templates(args.more, conversations)
    env = environment()
    wants, gots, bad = [oracle(env, c) for c in cases], run_ours(args.tool, cases), 0
    for case, want, got in zip(cases, wants, gots):
        same = want["out"] == got.get("out") if "out" in want else "error" in got
        if not same:
            bad += 1
            print(f"{case['name']}\n  template {case['template'][:300]!r}\n  jinja2 {want}\n  quire  {got}")
    print(f"{len(cases)} cases, {sum('out' in w for w in wants)} with output, {bad} differ")
    if args.write:
        with open(os.path.join(HERE, "expected.jsonl"), "w", encoding="utf-8") as f:
            f.write(json.dumps({"vars": VARS, "trusted": TRUSTED}, ensure_ascii=False) + "\n")
            f.writelines(expected_line(c, w) + "\n" for c, w in zip(cases[:own], wants[:own]))
    sys.exit(bad != 0)


if __name__ == "__main__":
    main()
