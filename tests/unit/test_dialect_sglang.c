/* POST /generate as SGLang: text and input_ids, batches, meta_info, cumulative chunks. */
#include "tests/unit/dialect_case.h"

static void fields(void **state) {
    struct ask ask;
    case_ask(&ask, ASK_GENERATE,
             "{\"text\":\"abc\",\"rid\":\"r1\",\"sampling_params\":{\"max_new_tokens\":9,\"min_new_tokens\":2,"
             "\"temperature\":5,\"top_p\":0.9,"
             "\"top_k\":5,\"min_p\":0.1,\"repetition_penalty\":1.1,\"presence_penalty\":1,\"frequency_penalty\":-1,"
             "\"n\":2,\"stop\":\"x\","
             "\"stop_token_ids\":[3],\"ignore_eos\":true,\"no_stop_trim\":true,\"skip_special_tokens\":false,"
             "\"sampling_seed\":11,"
             "\"logit_bias\":{\"1\":2}},\"return_logprob\":true,\"top_logprobs_num\":3,\"extra_key\":\"k\",\"stream\":"
             "true}");
    const struct request *r = ask.requests[0];
    assert_ptr_equal(ask.dialect, &dialect_sglang);
    assert_string_equal(ask.label, "r1");
    assert_int_equal(r->n, 2);
    assert_int_equal(r->max_tokens, 9);
    assert_int_equal(r->min_tokens, 2);
    assert_int_equal(r->logprobs, 3);
    assert_int_equal(r->flags, REQUEST_IGNORE_EOS | REQUEST_KEEP_STOP | REQUEST_KEEP_SPECIAL);
    assert_true(r->sampling.temperature == 5 && r->sampling.seed == 11 && r->sampling.frequency_penalty == -1);
    assert_int_equal(r->sampling.top_k, 5);
    assert_true(r->salt.lo || r->salt.hi);
    assert_int_equal(r->bias_ids.count, 1);
    ask_deinit(&ask);
}

static void defaults(void **state) {
    struct ask ask;
    case_ask(&ask, ASK_GENERATE, "{\"text\":\"abc\"}");
    assert_int_equal(ask.requests[0]->max_tokens, CASE_CONTEXT - 3); /* 128, as far as it fits */
    assert_true(ask.requests[0]->sampling.temperature == 1);
    ask_deinit(&ask);
    case_ask(&ask, ASK_GENERATE, "{\"text\":null,\"input_ids\":[1,2],\"sampling_params\":{\"temperature\":0}}");
    assert_true(ask.requests[0]->sampling.temperature == 0);
    assert_false(ask.batch);
    ask_deinit(&ask);
    case_ask(&ask, ASK_GENERATE, "{\"input_ids\":[[1,2]],\"rid\":[\"a\"]}");
    assert_true(ask.batch);
    ask_deinit(&ask);
}

static void refusals(void **state) {
#define PARAMS(rest) "{\"text\":\"a\",\"sampling_params\":{" rest "}}"
    static const struct case_bad bad[] = {
        {"{\"text\":\"a\",\"input_ids\":[1]}", "text", "exactly one"},
        {"{\"input_embeds\":[[0.1]]}", "input_embeds", "not supported"},
        {"{\"text\":\"\"}", "text", "must not be empty"},
        {"{\"text\":[]}", "text", "must not be empty"},
        {"{\"text\":5}", "text", "string or a list of strings"},
        {"{\"text\":[1]}", "text", "string or a list of strings"},
        {"{\"input_ids\":\"a\"}", "input_ids", "list of token ids"},
        {"{\"input_ids\":[260]}", "input_ids", "from 0 to 259"},
        {"{\"input_ids\":[[1],[-1]]}", "input_ids", "from 0 to 259"},
        {"{\"text\":\"a\",\"sampling_params\":[{}]}", "sampling_params", "one object"},
        {PARAMS("\"temperature\":-1"), "temperature", ">= 0"},
        {PARAMS("\"temperature\":1e999"), "temperature", "finite"},
        {PARAMS("\"top_p\":0"), "top_p", "> 0"},
        {PARAMS("\"top_k\":0"), "top_k", "-1 (all) or at least 1"},
        {PARAMS("\"repetition_penalty\":2.5"), "repetition_penalty", "<= 2"},
        {PARAMS("\"max_new_tokens\":0"), "max_new_tokens", "from 1"},
        {PARAMS("\"max_new_tokens\":100"), "max_new_tokens", "total of 101 tokens: 1 tokens"},
        {PARAMS("\"max_new_tokens\":5,\"min_new_tokens\":6"), "min_tokens", "which is 5"},
        {PARAMS("\"regex\":\"a\""), "regex", "not supported"},
        {PARAMS("\"n\":2,\"temperature\":0"), "n", "greedy"},
        {PARAMS("\"stop_token_ids\":[999999]"), "stop_token_ids", "from 0 to 259"},
        {"{\"text\":\"a\",\"rid\":\"\"}", "rid", "1 to 128"},
        {"{\"text\":\"a\",\"rid\":[\"a\",\"b\"]}", "rid", "one string for each"},
        {"{\"text\":\"a\",\"return_logprob\":true,\"logprob_start_len\":0}", "logprob_start_len", "must be -1"},
        {"{\"text\":\"a\",\"return_logprob\":true,\"top_logprobs_num\":21}", "top_logprobs_num", "from 0 to 20"},
        {"{\"text\":\"a\",\"lora_path\":\"x\"}", "lora_path", "not supported"},
    };
    struct buf body = {0};
    struct ask ask;
    struct err err;
    case_refused(ASK_GENERATE, bad, sizeof bad / sizeof *bad);
    buf_append_str(&body, "{\"input_ids\":[1");
    for (int i = 0; i < 100; i++) buf_append_str(&body, ",1");
    buf_append_str(&body, "]}");
    assert_int_equal(case_try(&ask, ASK_GENERATE, body.data, &err), ERR_INVALID);
    assert_string_equal(err.text, "The input (101 tokens) is longer than the model's context length (100 tokens).");
    ask_deinit(&ask);
    buf_deinit(&body);
}

#define META(finish, p, c, rest)                                                                                       \
    "\"meta_info\":{\"id\":\"id-1\",\"finish_reason\":" finish ",\"prompt_tokens\":" #p ",\"completion_tokens\":" #c   \
    ",\"cached_tokens\":2,\"reasoning_tokens\":0,\"weight_version\":\"default\",\"num_retractions\":0" rest "}"

static void reply(void **state) {
    struct case_run run;
    case_begin(&run, ASK_GENERATE,
               "{\"text\":\"abc\",\"return_logprob\":true,\"return_text_in_logprobs\":true,\"top_logprobs_num\":1}");
    run.answer.begin_ns = 1;
    case_event(&run, 0, "x\xFE", "x", FINISH_STOP, STOP_EOS, 257);
    assert_string_equal(
        case_reply(&run),
        "{\"text\":\"x\",\"output_ids\":[120,257]," META(
            "{\"type\":\"stop\",\"matched\":257}", 3, 2,
            ",\"input_token_logprobs\":[],\"output_token_logprobs\":[[-0.5,120,\"x\"],[-0.5,257,\"</s>\"]],"
            "\"input_top_logprobs\":[],\"output_top_logprobs\":[[[-0.5,120,\"x\"]],[[-0.5,257,\"</s>\"]]],"
            "\"e2e_latency\":0.000000") "}");
    case_end(&run);
    case_begin(&run, ASK_GENERATE, "{\"text\":\"abc\",\"sampling_params\":{\"stop\":[\"q\",\"END\"]}}");
    case_event(&run, 0, "x", "x", FINISH_STOP, STOP_STRING, 1);
    assert_non_null(strstr(case_reply(&run), "{\"type\":\"stop\",\"matched\":\"END\"}"));
    case_end(&run);
}

static void batch(void **state) {
    struct case_run run;
    case_begin(&run, ASK_GENERATE, "{\"input_ids\":[[1,2],[3]],\"rid\":[\"ra\",\"rb\"]}");
    case_event(&run, 0, "x", "x", FINISH_LENGTH, STOP_NONE, 0);
    case_event(&run, 1, "yz", "yz", FINISH_LENGTH, STOP_NONE, 0);
    const char *text = case_reply(&run);
    assert_int_equal(text[0], '[');
    assert_non_null(strstr(text, "{\"text\":\"x\",\"output_ids\":[120],\"meta_info\":{\"id\":\"ra\",\"finish_reason\":{"
                                 "\"type\":\"length\",\"length\":1},\"prompt_tokens\":2,"));
    assert_non_null(strstr(text, "{\"text\":\"yz\",\"output_ids\":[121,122],\"meta_info\":{\"id\":\"rb\",\"finish_"
                                 "reason\":{\"type\":\"length\",\"length\":2},\"prompt_tokens\":1,"));
    case_end(&run);
    /* A list of one is still a list. */
    case_begin(&run, ASK_GENERATE, "{\"text\":[\"a\"]}");
    case_event(&run, 0, "x", "x", FINISH_LENGTH, STOP_NONE, 0);
    assert_int_equal(case_reply(&run)[0], '[');
    case_end(&run);
}

static void stream(void **state) {
    struct case_run run;
    case_begin(&run, ASK_GENERATE, "{\"text\":\"abc\",\"stream\":true}");
    case_event(&run, 0, "x", "x", FINISH_NONE, STOP_NONE, 0);
    assert_string_equal(case_chunk(&run, 0),
                        "data: {\"text\":\"x\",\"output_ids\":[120]," META("null", 3, 1, "") "}\n\n");
    assert_string_equal(case_chunk(&run, 0), "");
    run.answer.begin_ns = 1;
    case_event(&run, 0, "y", "y", FINISH_LENGTH, STOP_NONE, 0);
    assert_string_equal(case_chunk(&run, 0),
                        "data: {\"text\":\"xy\",\"output_ids\":[120,121]," META(
                            "{\"type\":\"length\",\"length\":2}", 3, 2, ",\"e2e_latency\":0.000000") "}\n\n");
    assert_string_equal(case_finish(&run), "data: [DONE]\n\n");
    case_end(&run);
    case_begin(&run, ASK_GENERATE, "{\"text\":\"abc\",\"stream\":true,\"sampling_params\":{\"n\":2}}");
    case_event(&run, 1, "x", "x", FINISH_NONE, STOP_NONE, 0);
    assert_non_null(strstr(case_chunk(&run, 1), "},\"index\":1}\n\n"));
    case_end(&run);
}

static void errors(void **state) {
    struct buf out = {0};
    struct err err;
    err_set_field(&err, ERR_INVALID, "n", "bad n");
    dialect_sglang.error(400, &err, &out);
    assert_string_equal(out.data, "{\"error\":{\"message\":\"bad n\"}}");
    buf_clear(&out);
    dialect_sglang.error_event(500, &err, &out);
    assert_string_equal(
        out.data,
        "data: {\"error\":{\"message\":\"bad n\",\"type\":\"InternalServerError\",\"code\":500,\"retryable\":true}}\n\n"
        "data: [DONE]\n\n");
    buf_deinit(&out);
}

static void bounded(void **state) {
    case_bounded(ASK_GENERATE, "{\"text\":\"a\",\"return_logprob\":true,\"top_logprobs_num\":2,"
                               "\"return_text_in_logprobs\":true}");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fields), cmocka_unit_test(defaults), cmocka_unit_test(refusals), cmocka_unit_test(reply),
        cmocka_unit_test(batch),  cmocka_unit_test(stream),   cmocka_unit_test(errors),   cmocka_unit_test(bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
