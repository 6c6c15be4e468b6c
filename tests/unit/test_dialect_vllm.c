/* POST /generate as vLLM's demo server: fields, defaults, refusals, replies, the stream of lines. Also what is shared
 * by every dialect that uses vLLM's names, and how dialects are told apart. */
#include "tests/unit/dialect_case.h"

static void fields(void **state) {
    struct ask ask;
    case_ask(
        &ask, ASK_GENERATE,
        "{\"prompt\":\"abc\",\"n\":2,\"temperature\":0.5,\"top_p\":0.9,\"top_k\":5,\"min_p\":0.1,\"max_tokens\":9,"
        "\"min_tokens\":2,\"repetition_penalty\":1.1,\"presence_penalty\":-2,\"frequency_penalty\":2,\"seed\":-5,"
        "\"stop\":[\"x\",\"yz\"],\"stop_token_ids\":[1,259],\"ignore_eos\":true,\"include_stop_str_in_output\":true,"
        "\"skip_special_tokens\":false,\"logit_bias\":{\"0\":-200,\"259\":1.5},\"cache_salt\":\"s\",\"unknown\":{\"a\":"
        "1}}");
    const struct request *r = ask.requests[0];
    assert_ptr_equal(ask.dialect, &dialect_vllm);
    assert_int_equal(r->n, 2);
    assert_int_equal(r->max_tokens, 9);
    assert_int_equal(r->min_tokens, 2);
    assert_int_equal(r->logprobs, -1);
    assert_int_equal(r->flags, REQUEST_IGNORE_EOS | REQUEST_KEEP_STOP | REQUEST_KEEP_SPECIAL | REQUEST_FINAL_ONLY);
    assert_true(r->sampling.temperature == 0.5f && r->sampling.top_p == 0.9f && r->sampling.min_p == 0.1f);
    assert_int_equal(r->sampling.top_k, 5);
    assert_true(r->sampling.repetition_penalty == 1.1f && r->sampling.presence_penalty == -2 &&
                r->sampling.frequency_penalty == 2);
    assert_true(r->sampling.seed == (uint64_t)-5);
    assert_int_equal(r->prompt.count, 3);
    assert_int_equal(request_prompt(r)[2], 'c');
    size_t bytes;
    assert_int_equal(r->stops.count, 2);
    assert_memory_equal(request_stop(r, 1, &bytes), "yz", 2);
    assert_int_equal(r->stop_ids.count, 2);
    assert_int_equal(r->eos_ids.count, 2);
    assert_int_equal(r->bias_ids.count, 2);
    assert_true(((const float *)record_at(r, r->bias))[0] == -100);
    assert_true(r->salt.lo || r->salt.hi);
    ask_deinit(&ask);
}

/* Of the body only the texts that the answer may show stay in memory. */
static void body_let_go(void **state) {
    struct ask ask;
    case_ask(&ask, ASK_GENERATE,
             "{\"prompt\":\"abc\",\"n\":2,\"stop\":[\"x\",\"yz\"],\"junk\":[1,2,[3]],\"parameters\":{\"a\":[1],"
             "\"stop\":[1,{}]},"
             "\"rid\":[0,[1]]}");
    char *left = cJSON_PrintUnformatted(ask.tree);
    assert_string_equal(left, "{\"prompt\":\"abc\",\"stop\":[\"x\",\"yz\"],\"parameters\":{\"stop\":[]},\"rid\":[]}");
    cJSON_free(left);
    assert_string_equal(ask.prompts[0].text, "abc");
    assert_string_equal(ask.stops[1], "yz");
    ask_deinit(&ask);
    case_ask(
        &ask, ASK_GENERATE,
        "{\"text\":[\"ab\",\"c\"],\"rid\":[\"q\",\"r\"],\"sampling_params\":{\"n\":1,\"stop\":\"s\"},\"junk\":\"j\"}");
    left = cJSON_PrintUnformatted(ask.tree);
    assert_string_equal(left, "{\"text\":[\"ab\",\"c\"],\"rid\":[\"q\",\"r\"],\"sampling_params\":{\"stop\":\"s\"}}");
    cJSON_free(left);
    assert_string_equal(ask.prompts[1].text, "c");
    assert_string_equal(cJSON_GetArrayItem(ask.labels, 1)->valuestring, "r");
    ask_deinit(&ask);
}

static void defaults(void **state) {
    struct ask ask;
    case_ask(&ask, ASK_GENERATE, "{\"prompt\":\"abc\",\"temperature\":null,\"stop\":null,\"seed\":-1}");
    const struct request *r = ask.requests[0];
    assert_int_equal(r->max_tokens, 16);
    assert_true(r->sampling.temperature == 1 && r->sampling.top_p == 1 && r->sampling.repetition_penalty == 1);
    assert_int_equal(r->sampling.top_k, 0);
    assert_true(r->sampling.seed == 77);
    assert_int_equal(r->salt.lo, 0);
    ask_deinit(&ask);
    case_ask(&ask, ASK_GENERATE, "{\"prompt\":\"abc\",\"temperature\":0.001,\"top_k\":-1,\"stream\":true}");
    assert_true(ask.requests[0]->sampling.temperature == 0.01f);
    assert_int_equal(ask.requests[0]->flags, 0);
    ask_deinit(&ask);
    /* As in that server, a max_tokens beyond the context is shortened. */
    case_ask(&ask, ASK_GENERATE, "{\"prompt\":\"abc\",\"max_tokens\":100000}");
    assert_int_equal(ask.requests[0]->max_tokens, CASE_CONTEXT - 3);
    ask_deinit(&ask);
    case_ask(&ask, ASK_GENERATE, "{\"prompt\":\"<|im_start|>a\",\"truncate_prompt_tokens\":1}");
    assert_int_equal(ask.requests[0]->prompt.count, 1);
    assert_int_equal(request_prompt(ask.requests[0])[0], 'a');
    ask_deinit(&ask);
}

static void refusals(void **state) {
    static const struct case_bad bad[] = {
        {"", "", "value is missing"},
        {"[]", "", "must be a JSON object"},
        {"{\"prompt\":\"a\"", "", "byte 13"},
        {"{\"prompt\":\"\xFF\"}", "", "invalid UTF-8"},
        {"{}", "prompt", "no prompt"},
        {"{\"prompt\":null}", "prompt", "no prompt"},
        {"{\"prompt\":\"a\",\"inputs\":\"a\"}", "prompt", "mixes dialects"},
        {"{\"prompt\":\"a\",\"text\":\"a\"}", "prompt", "mixes dialects"},
        {"{\"prompt\":\"\"}", "prompt", "must not be empty"},
        {"{\"prompt\":5}", "prompt", "must be a string"},
        {"{\"prompt\":{\"a\":1}}", "prompt", "must be a string"},
        {"{\"prompt\":\"a\",\"n\":0}", "n", "from 1 to 128"},
        {"{\"prompt\":\"a\",\"n\":129}", "n", "from 1 to 128"},
        {"{\"prompt\":\"a\",\"n\":1.5}", "n", "from 1 to 128"},
        {"{\"prompt\":\"a\",\"n\":\"1\"}", "n", "from 1 to 128"},
        {"{\"prompt\":\"a\",\"n\":1e30}", "n", "from 1 to 128"},
        {"{\"prompt\":\"a\",\"n\":true}", "n", "from 1 to 128"},
        {"{\"prompt\":\"a\",\"n\":2,\"temperature\":0}", "n", "greedy"},
        {"{\"prompt\":\"a\",\"temperature\":-0.1}", "temperature", ">= 0 and <= 2"},
        {"{\"prompt\":\"a\",\"temperature\":2.1}", "temperature", ">= 0 and <= 2, got 2.1"},
        {"{\"prompt\":\"a\",\"temperature\":1e999}", "temperature", "finite"},
        {"{\"prompt\":\"a\",\"temperature\":\"1\"}", "temperature", "finite"},
        {"{\"prompt\":\"a\",\"temperature\":[1]}", "temperature", "finite"},
        {"{\"prompt\":\"a\",\"logprobs\":-1}", "logprobs", "from 0 to 20"},
        {"{\"prompt\":\"a\",\"logprobs\":21}", "logprobs", "from 0 to 20"},
        {"{\"prompt\":\"a\",\"truncate_prompt_tokens\":0}", "truncate_prompt_tokens", "at least 1"},
        {"{\"prompt\":\"a\",\"truncate_prompt_tokens\":-2}", "truncate_prompt_tokens", "from -1"},
        {"{\"prompt\":\"a\",\"top_p\":0}", "top_p", "> 0 and <= 1"},
        {"{\"prompt\":\"a\",\"top_p\":1.01}", "top_p", "> 0 and <= 1"},
        {"{\"prompt\":\"a\",\"top_k\":-2}", "top_k", "from -1"},
        {"{\"prompt\":\"a\",\"top_k\":2147483648}", "top_k", "2147483647"},
        {"{\"prompt\":\"a\",\"min_p\":1.1}", "min_p", "<= 1"},
        {"{\"prompt\":\"a\",\"repetition_penalty\":0}", "repetition_penalty", "> 0"},
        {"{\"prompt\":\"a\",\"presence_penalty\":3}", "presence_penalty", "<= 2"},
        {"{\"prompt\":\"a\",\"frequency_penalty\":-3}", "frequency_penalty", ">= -2"},
        {"{\"prompt\":\"a\",\"seed\":9223372036854775808}", "seed", "64-bit"},
        {"{\"prompt\":\"a\",\"seed\":1.5}", "seed", "64-bit"},
        {"{\"prompt\":\"a\",\"max_tokens\":0}", "max_tokens", "from 1"},
        {"{\"prompt\":\"a\",\"max_tokens\":-1}", "max_tokens", "from 1"},
        {"{\"prompt\":\"a\",\"max_tokens\":99999999999999999999}", "max_tokens", "from 1"},
        {"{\"prompt\":\"a\",\"min_tokens\":17}", "min_tokens", "at most max_tokens, which is 16"},
        {"{\"prompt\":\"a\",\"min_tokens\":-1}", "min_tokens", "from 0"},
        {"{\"prompt\":\"a\",\"stop\":5}", "stop", "string or a list"},
        {"{\"prompt\":\"a\",\"stop\":[5]}", "stop", "string or a list"},
        {"{\"prompt\":\"a\",\"stop\":\"\"}", "stop", "1 to 256 bytes"},
        {"{\"prompt\":\"a\",\"stop\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"a\",\"b\",\"c\",\"d\","
         "\"e\",\"f\",\"g\",\"h\"]}",
         "stop", "at most 16"},
        {"{\"prompt\":\"a\",\"stop_token_ids\":[260]}", "stop_token_ids", "from 0 to 259"},
        {"{\"prompt\":\"a\",\"stop_token_ids\":[-1]}", "stop_token_ids", "from 0 to 259"},
        {"{\"prompt\":\"a\",\"stop_token_ids\":[1.5]}", "stop_token_ids", "from 0 to 259"},
        {"{\"prompt\":\"a\",\"stop_token_ids\":7}", "stop_token_ids", "list"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"260\":1}}", "logit_bias", "from 0 to 259"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"-1\":1}}", "logit_bias", "from 0 to 259"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"x\":1}}", "logit_bias", "from 0 to 259"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"9223372036854775808\":1}}", "logit_bias", "from 0 to 259"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"01\":1}}", "logit_bias", "from 0 to 259"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"1\":\"x\"}}", "logit_bias", "finite"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"1\":1e999}}", "logit_bias", "finite"},
        {"{\"prompt\":\"a\",\"logit_bias\":[]}", "logit_bias", "object"},
        {"{\"prompt\":\"a\",\"ignore_eos\":1}", "ignore_eos", "true or false"},
        {"{\"prompt\":\"a\",\"stream\":\"yes\"}", "stream", "true or false"},
        {"{\"prompt\":\"a\",\"use_beam_search\":true}", "use_beam_search", "not supported"},
        {"{\"prompt\":\"a\",\"bad_words\":[\"x\"]}", "bad_words", "not supported"},
        {"{\"prompt\":\"a\",\"allowed_token_ids\":[1]}", "allowed_token_ids", "not supported"},
        {"{\"prompt\":\"a\",\"prompt_logprobs\":1}", "prompt_logprobs", "not supported"},
        {"{\"prompt\":\"a\",\"structured_outputs\":{\"regex\":\"a\"}}", "structured_outputs", "not supported"},
        {"{\"prompt\":\"a\",\"priority\":1}", "priority", "not supported"},
        {"{\"prompt\":\"a\",\"best_of\":2}", "best_of", "larger than n"},
        {"{\"prompt\":\"a\",\"cache_salt\":\"\"}", "cache_salt", "1 to 1024"},
        {"{\"prompt\":\"a\",\"truncate_prompt_tokens\":-2}", "truncate_prompt_tokens", "from -1"},
        {"{\"prompt\":\"a\",\"temperature\":1,\"temperature\":1}", "", "twice"},
    };
    struct ask ask;
    case_refused(ASK_GENERATE, bad, sizeof bad / sizeof *bad);
    case_ask(&ask, ASK_GENERATE,
             "{\"prompt\":\"a\",\"bad_words\":[],\"priority\":0,\"use_beam_search\":false,\"best_of\":1}");
    ask_deinit(&ask);
}

static void too_long(void **state) {
    char body[4096], *at = body + sprintf(body, "{\"prompt\":\"");
    struct ask ask;
    struct err err;
    memset(at, 'a', 100);
    strcpy(at + 100, "\"}");
    assert_int_equal(case_try(&ask, ASK_GENERATE, body, &err), ERR_INVALID);
    assert_string_equal(err.field, "input_tokens");
    assert_non_null(strstr(err.text, "maximum context length is 100 tokens"));
    assert_non_null(strstr(err.text, "contains 100 input tokens"));
    ask_deinit(&ask);
    /* Refused from its bytes alone. */
    memset(at, 'a', 2000);
    strcpy(at + 2000, "\"}");
    assert_int_equal(case_try(&ask, ASK_GENERATE, body, &err), ERR_INVALID);
    assert_non_null(strstr(err.text, "contains at least 166 input tokens"));
    ask_deinit(&ask);
    strcpy(at + 99, "\"}");
    case_ask(&ask, ASK_GENERATE, body);
    assert_int_equal(ask.requests[0]->max_tokens, 1);
    ask_deinit(&ask);
}

static void reply(void **state) {
    struct case_run run;
    case_begin(&run, ASK_GENERATE, "{\"prompt\":\"a\\\"b\",\"n\":2}");
    case_event(&run, 0, "xy", "x\ny", FINISH_LENGTH, STOP_NONE, 0);
    case_event(&run, 1, "z", "z", FINISH_STOP, STOP_EOS, 257);
    assert_string_equal(case_reply(&run), "{\"text\":[\"a\\\"bx\\ny\",\"a\\\"bz\"]}");
    case_end(&run);
}

static void stream(void **state) {
    struct case_run run;
    case_begin(&run, ASK_GENERATE, "{\"prompt\":\"P\",\"n\":2,\"stream\":true}");
    assert_true(dialect_vllm.by_step);
    case_event(&run, 0, "x", "x", FINISH_NONE, STOP_NONE, 0);
    assert_string_equal(case_chunk(&run, 0), "{\"text\":[\"Px\",\"P\"]}\n");
    assert_string_equal(case_chunk(&run, 0), "");
    case_event(&run, 1, "\x80", "", FINISH_NONE, STOP_NONE, 0);
    assert_string_equal(case_chunk(&run, 0), "");
    case_event(&run, 1, "y", "y", FINISH_LENGTH, STOP_NONE, 0);
    case_event(&run, 0, "z", "z", FINISH_LENGTH, STOP_NONE, 0);
    assert_string_equal(case_chunk(&run, 0), "{\"text\":[\"Pxz\",\"Py\"]}\n");
    assert_string_equal(case_finish(&run), "");
    case_end(&run);
}

static void errors(void **state) {
    struct buf out = {0};
    struct err err;
    err_set_field(&err, ERR_INVALID, "n", "n must be \"small\"");
    dialect_vllm.error(400, &err, &out);
    assert_string_equal(out.data, "{\"error\":{\"message\":\"n must be "
                                  "\\\"small\\\"\",\"type\":\"BadRequestError\",\"param\":\"n\",\"code\":400}}");
    assert_int_equal(dialect_status(&dialect_vllm, ERR_EXHAUSTED), 429);
    assert_int_equal(dialect_status(&dialect_vllm, ERR_CLOSED), 503);
    assert_int_equal(dialect_status(&dialect_tgi, ERR_INVALID), 422);
    buf_deinit(&out);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fields),   cmocka_unit_test(body_let_go), cmocka_unit_test(defaults),
        cmocka_unit_test(refusals), cmocka_unit_test(too_long),    cmocka_unit_test(reply),
        cmocka_unit_test(stream),   cmocka_unit_test(errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
