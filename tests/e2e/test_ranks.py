"""The device call of one rank's thread fails while its engine answers: when clients hear of it, that the other engine
goes on, and how soon both are there again. QUIRE_LONG=1: 20 times instead of 3."""

import json
import os
import tempfile
import time
import unittest

from http_support import default_model
from test_replicas import KEY, RANKS, SLOW, Base, Stream, batches, replicas, wait_for


ASK = {"model": "default", "prompt": "Count: one, two,", "max_tokens": 300, "temperature": 0, "ignore_eos": True}


@unittest.skipUnless(default_model(), "skipped: the default model was not fetched")
class Ranks(Base):
    def test_device_call_fails(self):
        file = os.path.join(tempfile.gettempdir(), "quire-fault-%d" % os.getpid())
        for kind, count in [(kind, count) for kind in ("fail", "result") for count in batches(6)]:
            fault = "rank:1,step:1,%s,once:%s" % (kind, file)
            flags = (*RANKS, "--routing-policy", "round-robin", "--step-timeout", "10")
            server = self.server(2, *flags, env={"QUIRE_FAULT": fault}, model=default_model())
            load = max(r["last_start_seconds"] for r in replicas(server))
            for _ in range(count):
                before = replicas(server)
                streams = [Stream(server, 300, json.dumps({**ASK, "stream": True})) for _ in range(4)]
                for stream in streams:
                    self.assertTrue(stream.begun.wait(60))
                open(file, "w").close()
                begun = time.monotonic()
                wait_for(lambda: not os.path.exists(file), 5 * SLOW, "the fault")
                at = time.monotonic()
                seen = wait_for(
                    lambda: sum(r["deaths"] for r in replicas(server)) > sum(r["deaths"] for r in before),
                    0.5 * SLOW,
                    "the death seen",
                )
                dead = [i for i in (0, 1) if replicas(server)[i]["deaths"] > before[i]["deaths"]]
                ends = [stream.end() for stream in streams]
                self.assertEqual(sorted(ends), ["error"] * 2 + ["whole"] * 2)
                told = max(s.ended for s, end in zip(streams, ends) if end == "error") - at
                self.assertLess(told, 1 * SLOW)
                self.assertEqual(len(dead), 1)
                self.assertIn("rank 1", replicas(server)[dead[0]]["last_death"])
                again = self.wait_up(server, 2, 2 * load + 5)
                self.assertEqual(replicas(server)[1 - dead[0]]["pid"], before[1 - dead[0]]["pid"])
                print("%s: seen after %.3f s, streams told after %.3f s, up again %.1f s after the others' end (%.1f s)"
                      % (kind, seen, told, again, time.monotonic() - begun), flush=True)


if __name__ == "__main__":
    unittest.main(verbosity=2)
