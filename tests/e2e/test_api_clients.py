"""The real clients: the openai package and TGI's text-generation."""

import os
import sys
import unittest
import warnings

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from lib import Server  # noqa: E402

FRANCE = "The capital of France is"


def setUpModule():
    global server
    server = Server()


def tearDownModule():
    server.close()


class OpenAi(unittest.TestCase):
    def setUp(self):
        try:
            import openai
        except ImportError:
            self.skipTest("skipped: no openai package")
        self.openai = openai
        self.client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)

    def tearDown(self):
        self.client.close()

    def test_models(self):
        self.assertEqual([m.id for m in self.client.models.list()][0], server.model)
        self.assertEqual(self.client.models.retrieve(server.model).id, server.model)

    def test_completion(self):
        reply = self.client.completions.create(
            model=server.model, prompt=FRANCE, max_tokens=8, temperature=0, logprobs=3
        )
        choice = reply.choices[0]
        self.assertEqual(len(choice.logprobs.tokens), 8)
        self.assertEqual(len(choice.logprobs.top_logprobs[0]), 3)
        self.assertEqual("".join(choice.logprobs.tokens), choice.text)
        self.assertEqual(choice.logprobs.text_offset[1], len(choice.logprobs.tokens[0]))
        if not server.fake:
            self.assertIn("Paris", choice.text)
        text, usage = "", None
        for chunk in self.client.completions.create(
            model=server.model,
            prompt=FRANCE,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            text += chunk.choices[0].text if chunk.choices else ""
            usage = chunk.usage or usage
        self.assertEqual(text, choice.text)
        self.assertEqual(usage.completion_tokens, reply.usage.completion_tokens)
        self.assertEqual(usage.prompt_tokens, reply.usage.prompt_tokens)

    def test_chat(self):
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Name a colour."}]},
        ]
        reply = self.client.chat.completions.create(
            model=server.model, messages=messages, max_tokens=10, temperature=0, logprobs=True, top_logprobs=2
        )
        choice = reply.choices[0]
        self.assertEqual(choice.message.role, "assistant")
        self.assertIn(choice.finish_reason, ("stop", "length"))
        self.assertEqual(len(choice.logprobs.content), reply.usage.completion_tokens)
        self.assertEqual(len(choice.logprobs.content[0].top_logprobs), 2)
        self.assertGreaterEqual(reply.usage.prompt_tokens_details.cached_tokens, 0)
        text, reason = "", None
        for chunk in self.client.chat.completions.create(
            model=server.model, messages=messages, max_tokens=10, temperature=0, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        self.assertEqual((text, reason), (choice.message.content, choice.finish_reason))
        self.assertGreater(len(text), 0)

    def test_extras(self):
        reply = self.client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": "Hi"}],
            n=2,
            seed=7,
            max_completion_tokens=5,
            extra_body={
                "top_k": 20,
                "min_p": 0.05,
                "ignore_eos": True,
                "return_token_ids": True,
                "chat_template_kwargs": {"x": 1},
            },
        )
        self.assertEqual(len(reply.choices), 2)
        self.assertEqual([len(c.token_ids) for c in reply.choices], [5, 5])
        self.assertEqual(reply.usage.completion_tokens, 10)

    def test_errors(self):
        with self.assertRaises(self.openai.NotFoundError) as caught:
            self.client.completions.create(model="nobody", prompt="a")
        self.assertEqual(caught.exception.body["param"], "model")
        with self.assertRaises(self.openai.BadRequestError) as caught:
            self.client.completions.create(model=server.model, prompt="a", n=1000)
        self.assertEqual(caught.exception.body["param"], "n")
        with self.assertRaises(self.openai.BadRequestError):
            self.client.chat.completions.create(
                model=server.model, messages=[{"role": "user", "content": "a"}], stream=True, max_tokens=-1
            )


class Tgi(unittest.TestCase):
    def setUp(self):
        warnings.simplefilter("ignore")
        try:
            import text_generation
            from text_generation.errors import ValidationError
        except ImportError:
            self.skipTest("skipped: no text-generation package")
        self.refused = ValidationError
        self.client = text_generation.Client(server.url, timeout=60)

    def test_chat(self):
        """It names the model "tgi", whatever is served."""
        reply = self.client.chat(messages=[{"role": "user", "content": "hi"}], max_tokens=4, seed=1)
        self.assertEqual(reply.choices[0].message.role, "assistant")
        self.assertTrue(reply.system_fingerprint)

    def test_generate(self):
        reply = self.client.generate(FRANCE, max_new_tokens=8)
        self.assertEqual(reply.details.generated_tokens, 8)
        self.assertEqual(reply.details.finish_reason.value, "length")
        self.assertIsNone(reply.details.seed)
        self.assertEqual("".join(t.text for t in reply.details.tokens), reply.generated_text)
        self.assertTrue(all(t.logprob <= 0 for t in reply.details.tokens))
        if not server.fake:
            self.assertIn("Paris", reply.generated_text)
        again = self.client.generate(FRANCE, max_new_tokens=8, return_full_text=True)
        self.assertEqual(again.generated_text, FRANCE + reply.generated_text)

    def test_stream(self):
        whole = self.client.generate(FRANCE, max_new_tokens=8).generated_text
        text, last = "", None
        for event in self.client.generate_stream(FRANCE, max_new_tokens=8):
            text += "" if event.token.special else event.token.text
            last = event
        self.assertEqual(text, whole)
        self.assertEqual(last.generated_text, whole)
        self.assertEqual(last.details.generated_tokens, 8)

    def test_sampling(self):
        one, two = (
            self.client.generate(FRANCE, max_new_tokens=8, do_sample=True, temperature=0.9, seed=3) for _ in range(2)
        )
        self.assertEqual(one.generated_text, two.generated_text)
        self.assertEqual(one.details.seed, 3)
        best = self.client.generate(FRANCE, max_new_tokens=6, do_sample=True, best_of=2, top_n_tokens=2)
        self.assertEqual(len(best.details.best_of_sequences), 1)
        self.assertEqual(len(best.details.top_tokens), best.details.generated_tokens)

    def test_stop_and_truncate(self):
        reply = self.client.generate(FRANCE, max_new_tokens=4, truncate=2)
        self.assertEqual(reply.details.generated_tokens, 4)
        if server.fake:
            self.skipTest("skipped: stop strings need the model")
        reply = self.client.generate(FRANCE, max_new_tokens=8, stop_sequences=["Pari"])
        self.assertEqual(reply.details.finish_reason.value, "stop_sequence")
        self.assertEqual(reply.generated_text, " ")

    def test_error(self):
        with self.assertRaises(self.refused):
            self.client.generate(FRANCE, max_new_tokens=10**8)

    def test_headers_and_info(self):
        reply = server.post("/generate", {"inputs": FRANCE, "parameters": {"max_new_tokens": 4}})
        self.assertEqual(set(reply.json()), {"generated_text"})
        self.assertEqual(reply.headers["x-generated-tokens"], "4")
        for name in (
            "x-compute-type",
            "x-total-time",
            "x-queue-time",
            "x-inference-time",
            "x-time-per-token",
            "x-prompt-tokens",
        ):
            self.assertIn(name, reply.headers)
        self.assertGreater(server.get("/info").json()["max_total_tokens"], 0)


if __name__ == "__main__":
    unittest.main()
