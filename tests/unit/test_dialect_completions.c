/* /v1/completions: prompts in four forms, the model's defaults, logprobs, echo, usage, chunks. */
#include "tests/unit/dialect_case.h"

static void prompts(void **state) {
    struct ask ask;
    case_ask(&ask, ASK_COMPLETIONS, "{\"model\":\"alias\",\"prompt\":[\"ab\",\"c\"],\"n\":3,\"temperature\":1}");
    assert_int_equal(ask.prompt_count, 2);
    assert_string_equal(ask.model, "alias");
    assert_int_equal(ask.requests[1]->n, 3);
    assert_int_equal(ask.requests[1]->prompt.count, 1);
    assert_true(ask.requests[0]->sampling.seed != ask.requests[1]->sampling.seed);
    ask_deinit(&ask);
    case_ask(&ask, ASK_COMPLETIONS, "{\"prompt\":[1,2,259],\"seed\":4}");
    assert_int_equal(ask.prompt_count, 1);
    assert_int_equal(request_prompt(ask.requests[0])[2], 259);
    assert_true(ask.requests[0]->sampling.seed == 4);
    assert_string_equal(ask.model, "served");
    ask_deinit(&ask);
    case_ask(&ask, ASK_COMPLETIONS, "{\"prompt\":[[1,2],[3]],\"seed\":4}");
    assert_int_equal(ask.prompt_count, 2);
    assert_int_equal(request_prompt(ask.requests[1])[0], 3);
    assert_true(ask.requests[1]->sampling.seed == 4);
    ask_deinit(&ask);
}

static void defaults(void **state) {
    struct ask ask;
    struct ask_view view = case_view();
    struct err err;
    case_ask(&ask, ASK_COMPLETIONS, "{\"prompt\":\"a\"}");
    assert_true(ask.requests[0]->sampling.temperature == 0.25f && ask.requests[0]->sampling.top_p == 0.5f);
    assert_int_equal(ask.requests[0]->sampling.top_k, 7);
    assert_true(ask.requests[0]->sampling.repetition_penalty == 1);
    assert_int_equal(ask.requests[0]->max_tokens, 16);
    ask_deinit(&ask);
    case_ask(&ask, ASK_COMPLETIONS, "{\"prompt\":\"a\",\"top_k\":-1,\"temperature\":1,\"top_p\":1}");
    assert_true(ask.requests[0]->sampling.temperature == 1);
    assert_int_equal(ask.requests[0]->sampling.top_k, 0);
    ask_deinit(&ask);
    view.model_defaults = false;
    const char *body = "{\"prompt\":\"a\"}";
    assert_int_equal(ask_prepare(&ask, &view, ASK_COMPLETIONS, body, strlen(body), &err), 0);
    assert_true(ask.requests[0]->sampling.temperature == 1);
    assert_int_equal(ask.requests[0]->sampling.top_k, 0);
    ask_deinit(&ask);
}

static void refusals(void **state) {
    static const struct case_bad bad[] = {
        {"{\"prompt\":\"a\",\"model\":\"x\"}", "model", "The model `x` does not exist."},
        {"{\"prompt\":\"a\",\"model\":5}", "model", "string"},
        {"{}", "prompt", "missing"},
        {"{\"prompt\":null}", "prompt", "missing"},
        {"{\"prompt\":[]}", "prompt", "must not be empty"},
        {"{\"prompt\":[[]]}", "prompt", "must not be empty"},
        {"{\"prompt\":[\"a\",\"\"]}", "prompt", "must not be empty"},
        {"{\"prompt\":[\"a\",1]}", "prompt", "one kind"},
        {"{\"prompt\":[1,\"a\"]}", "prompt", "from 0 to 259"},
        {"{\"prompt\":[[1],\"a\"]}", "prompt", "one kind"},
        {"{\"prompt\":[260]}", "prompt", "from 0 to 259"},
        {"{\"prompt\":[-1]}", "prompt", "from 0 to 259"},
        {"{\"prompt\":[9223372036854775808]}", "prompt", "from 0 to 259"},
        {"{\"prompt\":[1.5]}", "prompt", "from 0 to 259"},
        {"{\"prompt\":[true]}", "prompt", "must be a string"},
        {"{\"prompt\":\"a\",\"logprobs\":21}", "logprobs", "from 0 to 20"},
        {"{\"prompt\":\"a\",\"logprobs\":-1}", "logprobs", "from 0 to 20"},
        {"{\"prompt\":\"a\",\"logprobs\":true}", "logprobs", "from 0 to 20"},
        {"{\"prompt\":\"a\",\"logprobs\":1,\"echo\":true}", "echo", "cannot be combined"},
        {"{\"prompt\":\"a\",\"suffix\":\"b\"}", "suffix", "not supported"},
        {"{\"prompt\":\"a\",\"stream_options\":{\"include_usage\":true}}", "stream_options", "when stream is true"},
        {"{\"prompt\":\"a\",\"stream\":true,\"stream_options\":5}", "stream_options", "object"},
        {"{\"prompt\":\"a\",\"stream\":true,\"stream_options\":{\"include_usage\":1}}", "include_usage",
         "true or false"},
        {"{\"prompt\":\"a\",\"response_format\":{\"type\":\"json_object\"}}", "response_format", "structured output"},
        {"{\"prompt\":\"a\",\"response_format\":\"json\"}", "response_format", "object"},
        {"{\"prompt\":\"a\",\"request_id\":\"a b\"}", "request_id", "1 to 128"},
        {"{\"prompt\":\"a\",\"max_tokens\":100}", "input_tokens",
         "requested 100 output tokens and your prompt contains 1 input"},
        {"{\"prompt\":[\"a\",\"b\",\"c\",\"d\",\"e\",\"f\",\"g\",\"h\",\"i\"],\"n\":128}", "n", "at most 1024"},
    };
    struct buf many = {0};
    struct ask ask;
    struct err err;
    case_refused(ASK_COMPLETIONS, bad, sizeof bad / sizeof *bad);
    assert_int_equal(dialect_status(&dialect_completions, ERR_NOT_FOUND), 404);
    buf_append_str(&many, "{\"prompt\":[");
    for (int i = 0; i < 257; i++) buf_append_str(&many, i ? ",\"a\"" : "\"a\"");
    buf_append_str(&many, "]}");
    assert_int_equal(case_try(&ask, ASK_COMPLETIONS, many.data, &err), ERR_INVALID);
    assert_non_null(strstr(err.text, "at most 256 prompts, got 257"));
    ask_deinit(&ask);
    buf_deinit(&many);
}

#define HEAD "{\"id\":\"id-1\",\"object\":\"text_completion\",\"created\":1234,\"model\":\"served\",\"choices\":["
#define USAGE(p, c, t, k)                                                                                              \
    "\"usage\":{\"prompt_tokens\":" #p ",\"completion_tokens\":" #c ",\"total_tokens\":" #t                            \
    ",\"prompt_tokens_details\":{\"cached_tokens\":" #k "}}"

static void reply(void **state) {
    struct case_run run;
    case_begin(&run, ASK_COMPLETIONS, "{\"prompt\":[\"abc\",\"d\"],\"echo\":true,\"stop\":\"END\"}");
    case_event(&run, 0, "xy", "xy", FINISH_STOP, STOP_STRING, 0);
    case_event(&run, 1, "z", "z", FINISH_LENGTH, STOP_NONE, 0);
    assert_string_equal(
        case_reply(&run), HEAD
        "{\"index\":0,\"text\":\"abcxy\",\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":\"END\"},"
        "{\"index\":1,\"text\":\"dz\",\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null}]," USAGE(
            4, 3, 7, 4) "}");
    case_end(&run);
}

static void logprobs(void **state) {
    struct case_run run;
    case_begin(&run, ASK_COMPLETIONS,
               "{\"prompt\":\"a\",\"logprobs\":1,\"return_token_ids\":true,\"stop_token_ids\":[122]}");
    assert_int_equal(run.ask.requests[0]->logprobs, 1);
    case_event(&run, 0, "x\xC3\xA9z", "x\xC3\xA9", FINISH_STOP, STOP_ID, 122);
    assert_string_equal(case_reply(&run), HEAD "{\"index\":0,\"text\":\"x\xC3\xA9\",\"logprobs\":{\"text_offset\":[0,1,"
                                               "2,3],\"token_logprobs\":[-0.5,-0.5,-0.5,-0.5],"
                                               "\"tokens\":[\"x\",\"\uFFFD\",\"\uFFFD\",\"z\"],\"top_logprobs\":[{"
                                               "\"x\":-0.5},{\"\uFFFD\":-0.5},{\"\uFFFD\":-0.5},{\"z\":-0.5}]},"
                                               "\"finish_reason\":\"stop\",\"stop_reason\":122,\"prompt_token_ids\":["
                                               "97],\"token_ids\":[120,195,169,122]}]," USAGE(1, 4, 5, 2) "}");
    case_end(&run);
    case_begin(&run, ASK_COMPLETIONS, "{\"prompt\":\"a\",\"logprobs\":5,\"return_tokens_as_token_ids\":true}");
    case_event(&run, 0, "x", "x", FINISH_LENGTH, STOP_NONE, 0);
    assert_non_null(
        strstr(case_reply(&run),
               "\"tokens\":[\"token_id:120\"],\"top_logprobs\":[{\"token_id:120\":-0.5,\"token_id:121\":-1.25}]"));
    case_end(&run);
    /* Two tokens that look the same once written are one key, the likelier one's. */
    case_begin(&run, ASK_COMPLETIONS, "{\"prompt\":\"a\",\"logprobs\":2}");
    case_event(&run, 0, "\x80", "", FINISH_LENGTH, STOP_NONE, 0);
    assert_non_null(strstr(case_reply(&run), "\"top_logprobs\":[{\"\uFFFD\":-0.5}]"));
    case_end(&run);
}

static void stream(void **state) {
    struct case_run run;
    case_begin(
        &run, ASK_COMPLETIONS,
        "{\"prompt\":\"a\",\"n\":2,\"stream\":true,\"stream_options\":{\"include_usage\":true},\"stop\":[\"q\"]}");
    case_event(&run, 1, "x", "", FINISH_NONE, STOP_NONE, 0);
    assert_string_equal(case_chunk(&run, 1), ""); /* no empty deltas */
    case_event(&run, 1, "y", "xy", FINISH_NONE, STOP_NONE, 0);
    assert_string_equal(case_chunk(&run, 1),
                        "data: " HEAD "{\"index\":1,\"text\":\"xy\",\"logprobs\":null,\"finish_reason\":null}]}\n\n");
    case_event(&run, 1, "q", "", FINISH_STOP, STOP_STRING, 0);
    assert_string_equal(case_chunk(&run, 1),
                        "data: " HEAD "{\"index\":1,\"text\":\"\",\"logprobs\":null,\"finish_reason\":\"stop\","
                        "\"stop_reason\":\"q\"}]}\n\n");
    assert_string_equal(case_chunk(&run, 1), "");
    case_event(&run, 0, "z", "z", FINISH_LENGTH, STOP_NONE, 0);
    assert_string_equal(case_chunk(&run, 0),
                        "data: " HEAD "{\"index\":0,\"text\":\"z\",\"logprobs\":null,\"finish_reason\":\"length\","
                        "\"stop_reason\":null}]}\n\n");
    assert_string_equal(case_finish(&run), "data: " HEAD "]," USAGE(1, 4, 5, 2) "}\n\ndata: [DONE]\n\n");
    case_end(&run);
}

static void stream_extras(void **state) {
    struct case_run run;
    case_begin(&run, ASK_COMPLETIONS,
               "{\"prompt\":\"a\",\"stream\":true,\"echo\":true,\"return_token_ids\":true,\"stream_options\":{"
               "\"continuous_usage_stats\":true}}");
    case_event(&run, 0, "x", "x", FINISH_NONE, STOP_NONE, 0);
    assert_string_equal(
        case_chunk(&run, 0),
        "data: " HEAD "{\"index\":0,\"text\":\"ax\",\"logprobs\":null,\"finish_reason\":null,\"prompt_token_ids\":[97],"
        "\"token_ids\":[120]}]," USAGE(1, 1, 2, 2) "}\n\n");
    case_event(&run, 0, "y", "y", FINISH_LENGTH, STOP_NONE, 0);
    assert_string_equal(
        case_chunk(&run, 0),
        "data: " HEAD "{\"index\":0,\"text\":\"y\",\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null,"
        "\"token_ids\":[121]}]," USAGE(1, 2, 3, 2) "}\n\n");
    assert_string_equal(case_finish(&run), "data: [DONE]\n\n");
    case_end(&run);
    /* Offsets of log-probabilities go on from chunk to chunk. */
    case_begin(&run, ASK_COMPLETIONS, "{\"prompt\":\"a\",\"stream\":true,\"logprobs\":0}");
    case_event(&run, 0, "xy", "xy", FINISH_NONE, STOP_NONE, 0);
    assert_non_null(strstr(case_chunk(&run, 0), "\"text_offset\":[0,1],"));
    case_event(&run, 0, "z", "z", FINISH_LENGTH, STOP_NONE, 0);
    assert_non_null(
        strstr(case_chunk(&run, 0),
               "\"text_offset\":[2],\"token_logprobs\":[-0.5],\"tokens\":[\"z\"],\"top_logprobs\":[{\"z\":-0.5}]"));
    case_end(&run);
}

static void stream_error(void **state) {
    struct buf out = {0};
    struct err err;
    err_set(&err, ERR_FATAL, "it broke");
    dialect_completions.error_event(500, &err, &out);
    assert_string_equal(
        out.data,
        "data: {\"error\":{\"message\":\"it broke\",\"type\":\"InternalServerError\",\"param\":null,\"code\":500}}"
        "\n\ndata: [DONE]\n\n");
    buf_clear(&out);
    dialect_completions.error(505, &err, &out);
    assert_non_null(strstr(out.data, "\"type\":\"HTTPVersionNotSupportedError\""));
    buf_deinit(&out);
}

/* A prompt that is echoed in front of each sample counts as often. */
static void long_echo(void **state) {
    static const char *const flags[] = {"\"echo\":false", "\"echo\":true", "\"return_token_ids\":true"};
    struct ask_view view = case_view();
    view.max_model_len = 1 << 20;
    for (int i = 0; i < 3; i++) {
        struct buf body = {0};
        struct ask ask;
        struct err err = {0};
        size_t bytes = 600000;
        buf_printf(&body, "{\"n\":128,\"temperature\":1,\"max_tokens\":1,%s,\"prompt\":[\"b", flags[i]);
        for (int prompt = 0; prompt < 2; prompt++) {
            if (prompt) buf_append_str(&body, "\",\"");
            memset(buf_grow(&body, bytes), 'a', bytes);
            body.bytes += bytes;
        }
        buf_append_str(&body, "\"]}");
        int rc = ask_prepare(&ask, &view, ASK_COMPLETIONS, body.data, body.bytes, &err);
        assert_int_equal(rc, i ? ERR_INVALID : 0);
        assert_string_equal(err.field, i ? "n" : "");
        ask_deinit(&ask);
        buf_deinit(&body);
    }
}

static void bounded(void **state) {
    case_bounded(ASK_COMPLETIONS, "{\"prompt\":\"a\",\"logprobs\":2,\"max_tokens\":50}");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prompts),       cmocka_unit_test(defaults),     cmocka_unit_test(refusals),
        cmocka_unit_test(reply),         cmocka_unit_test(logprobs),     cmocka_unit_test(stream),
        cmocka_unit_test(stream_extras), cmocka_unit_test(stream_error), cmocka_unit_test(bounded),
        cmocka_unit_test(long_echo),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
