"""deploy/monitoring: every metric and label that an alert or a panel names is one that a live server has."""

import json
import os
import re
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from http_support import ROOT, Server  # noqa: E402

try:
    import yaml
except ImportError:
    yaml = None

FOLDER = os.path.join(ROOT, "deploy/monitoring")
GIVEN = {"instance", "job"}  # by the scraper
SELECTOR = re.compile(r"(?<![\w:$.\"])([a-zA-Z_][\w:]*)(?![\w:])(\{[^}]*\})?(?!\s*\()")
WORDS = {"by", "sum", "le", "on", "and", "or", "unless", "without", "ignoring"}


def live_series():
    """{name: ({label: {values}}, type)} of a server that answered a few requests."""
    with Server() as server:
        server.post("/v1/completions", '{"model":"fake","prompt":"hi","max_tokens":3}')
        server.post("/v1/completions", '{"model":')
        text = server.get("/metrics").body.decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    found = {"up": ({}, "gauge")}
    for name, labels in re.findall(r"^([\w:]+)(?:\{(.*)\})? \S+$", text, re.M):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        kinds = found.setdefault(name, ({}, types.get(name) or types.get(base)))[0]
        for label, value in re.findall(r'(\w+)="([^"]*)"', labels):
            kinds.setdefault(label, set()).add(value)
    return found


def problems(expression, series):
    grouped = set()
    for listed in re.findall(r"\bby \(([^)]*)\)", expression):
        grouped |= {label.strip() for label in listed.split(",")}
    bare = re.sub(r"\bby \([^)]*\)", "", expression)
    bare = re.sub(r"\[[^\]]*\]", "", bare)
    labels = set(GIVEN)
    for name, selector in SELECTOR.findall(bare):
        if name in WORDS or re.fullmatch(r"[\d.]+", name):
            continue
        if name not in series:
            yield "no metric is called " + name
            continue
        known, kind = series[name]
        labels |= set(known)
        for label, operator, value in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', selector):
            if label not in known and label not in GIVEN:
                yield "%s has no label %s" % (name, label)
            elif operator == "=" and label in known and value not in known[label] and label != "status":
                yield "%s is never %s of %s" % (value, label, name)
        ranged = re.search(r"(rate|increase)\(%s" % re.escape(name + selector), expression)
        if (kind == "gauge") == bool(ranged):
            yield "%s is a %s, %s a rate" % (name, kind, "and this is" if ranged else "and this is not")
    for label in grouped - labels:
        yield "nothing here has the label " + label


class Monitoring(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.series = live_series()

    def check(self, where, expression):
        expression = expression.replace("$__rate_interval", "5m")
        self.assertEqual(list(problems(expression, self.series)), [], "%s: %s" % (where, expression))
        self.assertEqual(expression.count("("), expression.count(")"), where)

    def test_would_tell(self):
        for expression in (
            "vllm:num_requests_runing",
            'sum(vllm:request_success_total{finished_reason="eror"})',
            "sum by (engin) (rate(quire:steps_total[1m]))",
            "rate(quire:kv_pages[1m])",
            "quire:steps_total > 1",
            'rate(quire:steps_total{stat="x"}[1m])',
        ):
            self.assertNotEqual(list(problems(expression, self.series)), [], expression)

    def test_alerts(self):
        if yaml is None:
            self.skipTest("skipped: no PyYAML here")
        with open(os.path.join(FOLDER, "alerts.yml")) as f:
            rules = yaml.safe_load(f)["groups"][0]["rules"]
        self.assertEqual(len({r["alert"] for r in rules}), len(rules))
        for rule in rules:
            self.check(rule["alert"], rule["expr"])
            self.assertIn(rule["labels"]["severity"], ("critical", "warning"))
            for label in re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])):
                grouped = re.findall(r"\bby \(([^)]*)\)", rule["expr"])
                self.assertTrue(not grouped or label in grouped[0].split(", "), "%s loses %s" % (rule["alert"], label))

    def test_scrape(self):
        if yaml is None:
            self.skipTest("skipped: no PyYAML here")
        with open(os.path.join(FOLDER, "prometheus.yml")) as f:
            whole = yaml.safe_load(f)
        self.assertTrue(all(os.path.exists(os.path.join(FOLDER, name)) for name in whole["rule_files"]))
        job = whole["scrape_configs"][0]
        self.assertEqual((job["job_name"], job["metrics_path"]), ("quire", "/metrics"))

    def test_promtool(self):
        if not shutil.which("promtool"):
            self.skipTest("skipped: no promtool here")
        command = ["promtool", "check", "config", "prometheus.yml"]
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_dashboard(self):
        with open(os.path.join(FOLDER, "grafana.json")) as f:
            board = json.load(f)
        panels = board["panels"]
        self.assertEqual(len({p["id"] for p in panels}), len(panels))
        names = {v["name"] for v in board["templating"]["list"]}
        taken = set()
        for panel in panels:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            self.assertFalse(cells & taken, panel["title"] + " lies on another panel")
            self.assertLessEqual(at["x"] + at["w"], 24)
            taken |= cells
            if panel["type"] == "row":
                continue
            self.assertTrue(panel["targets"], panel["title"])
            for target in panel["targets"]:
                self.check(panel["title"], target["expr"])
                used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
                self.assertLessEqual(used, names)
                grouped = re.findall(r"\bby \(([^)]*)\)", target["expr"])
                shown = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
                if grouped:
                    self.assertLessEqual(shown, set(grouped[0].split(", ")), panel["title"])
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                name, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["query"]["query"]).groups()
                self.assertIn(name, self.series)
                self.assertTrue(label in GIVEN or label in self.series[name][0])


if __name__ == "__main__":
    unittest.main()
