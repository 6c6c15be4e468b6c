/* POST /generate, /generate_stream and / as TGI: greedy or not, details, one event a token. */
#include "tests/unit/dialect_case.h"

static void fields(void **state) {
    struct ask ask;
    case_ask(
        &ask, ASK_GENERATE,
        "{\"inputs\":\"abc\",\"parameters\":{\"temperature\":3,\"top_p\":0.9,\"top_k\":5,\"typical_p\":0.5,"
        "\"repetition_penalty\":1.1,"
        "\"frequency_penalty\":0.5,\"max_new_tokens\":9,\"stop\":[\"x\"],\"seed\":18446744073709551615,\"truncate\":2,"
        "\"details\":true,\"top_n_tokens\":2,\"return_full_text\":true}}");
    const struct request *r = ask.requests[0];
    assert_ptr_equal(ask.dialect, &dialect_tgi);
    assert_int_equal(r->max_tokens, 9);
    assert_int_equal(r->logprobs, 2);
    assert_true(r->sampling.temperature == 3 && r->sampling.typical_p == 0.5f && r->sampling.frequency_penalty == 0.5f);
    assert_true(r->sampling.seed == UINT64_MAX);
    assert_int_equal(r->prompt.count, 2);
    assert_int_equal(request_prompt(r)[0], 'b');
    assert_int_equal(r->stops.count, 1);
    assert_int_equal(r->flags, REQUEST_FINAL_ONLY);
    ask_deinit(&ask);
}

static void greedy_or_not(void **state) {
    static const struct {
        const char *parameters;
        float temperature;
    } cases[] = {
        {"", 1},
        {",\"parameters\":null", 1},
        {",\"parameters\":{}", 0},
        {",\"parameters\":{\"do_sample\":false,\"repetition_penalty\":1.5}", 0},
        {",\"parameters\":{\"do_sample\":true}", 1},
        {",\"parameters\":{\"temperature\":0.5}", 0.5f},
        {",\"parameters\":{\"top_k\":5}", 1},
        {",\"parameters\":{\"top_p\":0.5}", 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char body[256];
        struct ask ask;
        snprintf(body, sizeof body, "{\"inputs\":\"abc\"%s}", cases[i].parameters);
        case_ask(&ask, ASK_GENERATE, body);
        assert_true(ask.requests[0]->sampling.temperature == cases[i].temperature);
        assert_int_equal(ask.requests[0]->max_tokens, CASE_CONTEXT - 3);
        assert_int_equal(ask.requests[0]->logprobs, -1);
        ask_deinit(&ask);
    }
}

static void routes(void **state) {
    struct ask ask;
    case_ask(&ask, ASK_GENERATE, "{\"inputs\":\"a\",\"stream\":true}"); /* this path never streams in TGI */
    assert_false(ask.stream || ask.array);
    ask_deinit(&ask);
    case_ask(&ask, ASK_GENERATE_STREAM, "{\"inputs\":\"a\"}");
    assert_true(ask.stream);
    assert_int_equal(ask.requests[0]->logprobs, 0);
    ask_deinit(&ask);
    case_ask(&ask, ASK_TGI_ROOT, "{\"inputs\":\"a\",\"stream\":true}");
    assert_true(ask.stream);
    ask_deinit(&ask);
    case_ask(&ask, ASK_TGI_ROOT, "{\"inputs\":\"a\"}");
    assert_true(ask.array && !ask.stream);
    ask_deinit(&ask);
}

static void refusals(void **state) {
#define PARAMS(rest) "{\"inputs\":\"a\",\"parameters\":{" rest "}}"
    static const struct case_bad bad[] = {
        {"{\"inputs\":\"\"}", "inputs", "must not be empty"},
        {"{\"inputs\":[\"a\"]}", "inputs", "must be a string"},
        {"{\"inputs\":\"a\",\"parameters\":[]}", "parameters", "object"},
        {PARAMS("\"temperature\":0"), "temperature", "> 0"},
        {PARAMS("\"temperature\":1e999"), "temperature", "finite"},
        {PARAMS("\"top_p\":1"), "top_p", "> 0 and < 1"},
        {PARAMS("\"typical_p\":0"), "typical_p", "> 0 and < 1"},
        {PARAMS("\"top_k\":0"), "top_k", "from 1"},
        {PARAMS("\"repetition_penalty\":0"), "repetition_penalty", "> 0"},
        {PARAMS("\"frequency_penalty\":2.5"), "frequency_penalty", "<= 2"},
        {PARAMS("\"max_new_tokens\":0"), "max_new_tokens", "from 1"},
        {PARAMS("\"max_new_tokens\":100"), "inputs",
         "must be <= 100. Given: 1 `inputs` tokens and 100 `max_new_tokens`"},
        {PARAMS("\"best_of\":3,\"do_sample\":true"), "best_of", "from 1 to 2"},
        {PARAMS("\"best_of\":2"), "best_of", "sampling"},
        {PARAMS("\"best_of\":2,\"do_sample\":true,\"seed\":1"), "best_of", "seed"},
        {PARAMS("\"stop\":[\"a\",\"b\",\"c\",\"d\",\"e\"]"), "stop", "at most 4"},
        {PARAMS("\"seed\":-1"), "seed", "from 0"},
        {PARAMS("\"truncate\":0"), "truncate", "from 1 to 99"},
        {PARAMS("\"truncate\":100"), "truncate", "from 1 to 99"},
        {PARAMS("\"top_n_tokens\":6"), "top_n_tokens", "from 0 to 5"},
        {PARAMS("\"watermark\":true"), "watermark", "not supported"},
        {PARAMS("\"grammar\":{\"type\":\"regex\",\"value\":\"a\"}"), "grammar", "not supported"},
        {PARAMS("\"decoder_input_details\":true"), "decoder_input_details", "not supported"},
        {PARAMS("\"do_sample\":1"), "do_sample", "true or false"},
    };
    static const struct case_bad stream_bad[] = {{PARAMS("\"best_of\":2,\"do_sample\":true"), "best_of", "streaming"},
                                                 {"{\"prompt\":\"a\"}", "inputs", "missing"}};
    struct ask ask;
    struct err err;
    char body[300];
    case_refused(ASK_GENERATE, bad, sizeof bad / sizeof *bad);
    case_refused(ASK_GENERATE_STREAM, stream_bad, sizeof stream_bad / sizeof *stream_bad);
    memset(body, 'a', sizeof body);
    memcpy(body, "{\"inputs\":\"", 11);
    strcpy(body + 11 + 100, "\"}");
    assert_int_equal(case_try(&ask, ASK_GENERATE, body, &err), ERR_INVALID);
    assert_string_equal(err.text, "`inputs` must have less than 100 tokens. Given: 100");
    ask_deinit(&ask);
}

#define TOKEN(id, text, special) "{\"id\":" #id ",\"text\":\"" text "\",\"logprob\":-0.5,\"special\":" #special "}"

static void reply(void **state) {
    struct case_run run;
    case_begin(&run, ASK_GENERATE, "{\"inputs\":\"a\",\"parameters\":{}}");
    case_event(&run, 0, "xy", "xy", FINISH_LENGTH, STOP_NONE, 0);
    assert_string_equal(case_reply(&run), "{\"generated_text\":\"xy\"}");
    case_end(&run);
    case_begin(&run, ASK_TGI_ROOT, "{\"inputs\":\"a\",\"parameters\":{\"details\":true,\"return_full_text\":true}}");
    case_event(&run, 0, "xy\xFE", "xy", FINISH_STOP, STOP_EOS, 257);
    assert_string_equal(case_reply(&run), "[{\"generated_text\":\"axy\",\"details\":{\"finish_reason\":\"eos_token\","
                                          "\"generated_tokens\":3,\"seed\":null,"
                                          "\"prefill\":[],\"tokens\":[" TOKEN(120, "x", false) "," TOKEN(
                                              121, "y", false) "," TOKEN(257, "</s>", true) "]}}]");
    case_end(&run);
    case_begin(&run, ASK_GENERATE,
               "{\"inputs\":\"a\",\"parameters\":{\"details\":true,\"top_n_tokens\":1,\"seed\":5,\"do_sample\":true,"
               "\"stop\":[\"q\"]}}");
    case_event(&run, 0, "x", "x", FINISH_STOP, STOP_STRING, 0);
    assert_string_equal(
        case_reply(&run),
        "{\"generated_text\":\"x\",\"details\":{\"finish_reason\":\"stop_sequence\",\"generated_tokens\":1,\"seed\":5,"
        "\"prefill\":[],\"tokens\":[" TOKEN(120, "x", false) "],\"top_tokens\":[[" TOKEN(120, "x", false) "]]}}");
    case_end(&run);
}

static void best_of(void **state) {
    struct case_run run;
    case_begin(&run, ASK_GENERATE,
               "{\"inputs\":\"a\",\"parameters\":{\"best_of\":2,\"do_sample\":true,\"details\":true}}");
    assert_int_equal(run.ask.requests[0]->n, 2);
    case_event(&run, 0, "xx", "xx", FINISH_LENGTH, STOP_NONE, 0);
    case_event(&run, 1, "y", "y", FINISH_STOP, STOP_STRING, 0); /* fewer tokens: the larger sum of log-probabilities */
    const char *text = case_reply(&run);
    assert_ptr_equal(strstr(text, "{\"generated_text\":\"y\""), text);
    assert_non_null(strstr(text, "\"best_of_sequences\":[{\"generated_text\":\"xx\",\"finish_reason\":\"length\""));
    case_end(&run);
}

static void stream(void **state) {
    struct case_run run;
    case_begin(&run, ASK_GENERATE_STREAM, "{\"inputs\":\"ab\",\"parameters\":{}}");
    case_event(&run, 0, "x", "x", FINISH_NONE, STOP_NONE, 0);
    assert_string_equal(case_chunk(&run, 0), "data:{\"index\":1,\"token\":" TOKEN(
                                                 120, "x", false) ",\"generated_text\":null,\"details\":null}\n\n");
    case_event(&run, 0, "y\xFE", "y", FINISH_STOP, STOP_EOS, 257);
    assert_string_equal(
        case_chunk(&run, 0),
        "data:{\"index\":2,\"token\":" TOKEN(
            121, "y", false) ",\"generated_text\":null,\"details\":null}\n\n"
                             "data:{\"index\":3,\"token\":" TOKEN(
                                 257, "</s>", true) ",\"generated_text\":\"xy\","
                                                    "\"details\":{\"finish_reason\":\"eos_token\",\"generated_tokens\":"
                                                    "3,\"seed\":null,\"input_length\":2}}\n\n");
    assert_string_equal(case_finish(&run), ""); /* no [DONE] in this dialect */
    case_end(&run);
    /* Held-back text comes with the token that releases it; joined it is the whole. */
    case_begin(&run, ASK_GENERATE_STREAM, "{\"inputs\":\"ab\",\"parameters\":{\"top_n_tokens\":1}}");
    case_event(&run, 0, "\xC3", "", FINISH_NONE, STOP_NONE, 0);
    assert_non_null(strstr(case_chunk(&run, 0), "\"text\":\"\",\"logprob\":-0.5,\"special\":false},\"top_tokens\":["));
    case_event(&run, 0, "\xA9", "\xC3\xA9", FINISH_LENGTH, STOP_NONE, 0);
    assert_non_null(strstr(case_chunk(&run, 0), "\"id\":169,\"text\":\"\xC3\xA9\""));
    case_end(&run);
}

static void errors(void **state) {
    struct buf out = {0};
    struct err err;
    err_set(&err, ERR_EXHAUSTED, "full");
    dialect_tgi.error(429, &err, &out);
    assert_string_equal(out.data, "{\"error\":\"full\",\"error_type\":\"overloaded\"}");
    buf_clear(&out);
    dialect_tgi.error_event(500, &err, &out);
    assert_string_equal(out.data, "data:{\"error\":\"full\",\"error_type\":\"incomplete_generation\"}\n\n");
    buf_clear(&out);
    dialect_tgi.error_event(504, &err, &out); /* a deadline */
    assert_string_equal(out.data, "data:{\"error\":\"full\",\"error_type\":\"incomplete_generation\"}\n\n");
    buf_clear(&out);
    dialect_tgi.error(422, &err, &out);
    assert_string_equal(out.data, "{\"error\":\"full\",\"error_type\":\"validation\"}");
    buf_clear(&out);
    dialect_tgi.error(401, &err, &out);
    assert_string_equal(out.data, "{\"error\":\"full\",\"error_type\":\"authentication\"}");
    buf_deinit(&out);
}

static void bounded(void **state) {
    case_bounded(ASK_GENERATE, "{\"inputs\":\"a\",\"parameters\":{\"details\":true,\"top_n_tokens\":2}}");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fields),   cmocka_unit_test(greedy_or_not), cmocka_unit_test(routes),
        cmocka_unit_test(refusals), cmocka_unit_test(reply),         cmocka_unit_test(best_of),
        cmocka_unit_test(stream),   cmocka_unit_test(errors),        cmocka_unit_test(bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
