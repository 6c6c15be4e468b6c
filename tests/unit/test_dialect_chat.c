/* /v1/chat/completions: messages, tools, log-probabilities, replies, deltas. */
#include "tests/unit/dialect_case.h"

static void prompt_is(struct ask *ask, const char *want) {
    const struct request *r = ask->requests[0];
    struct buf text = {0};
    text_decode(&case_text, request_prompt(r), r->prompt.count, false, &text);
    assert_string_equal(text.data, want);
    buf_deinit(&text);
    ask_deinit(ask);
}

static void messages(void **state) {
    struct ask ask;
    case_ask(&ask, ASK_CHAT,
             "{\"messages\":[{\"role\":\"system\",\"content\":\"S\"},{\"role\":\"user\",\"content\":\"U\"}]}");
    assert_int_equal(ask.requests[0]->max_tokens, CASE_CONTEXT - (int)strlen("system:S|user:U|assistant:"));
    assert_int_equal(ask.requests[0]->sampling.top_k, 7);
    prompt_is(&ask, "system:S|user:U|assistant:");
    case_ask(&ask, ASK_CHAT,
             "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"text\","
             "\"text\":\"b\"}]}]}");
    prompt_is(&ask, "user:a\nb|assistant:");
    case_ask(&ask, ASK_CHAT,
             "{\"messages\":[{\"role\":\"assistant\",\"content\":\"A\"}],\"continue_final_message\":true}");
    prompt_is(&ask, "assistant:A|");
    case_ask(&ask, ASK_CHAT,
             "{\"messages\":[{\"role\":\"user\",\"content\":\"U\"}],\"add_generation_prompt\":false,\"max_tokens\":5,"
             "\"max_completion_tokens\":6}");
    assert_int_equal(ask.requests[0]->max_tokens, 6);
    prompt_is(&ask, "user:U|");
    case_ask(&ask, ASK_CHAT, "{\"model\":\"tgi\",\"messages\":[{\"role\":\"user\",\"content\":\"U\"}]}");
    prompt_is(&ask, "user:U|assistant:");
    case_ask(&ask, ASK_CHAT,
             "{\"messages\":[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"function\":{\"name\":\"f\","
             "\"arguments\":"
             "\"{\\\"a\\\":1}\"}}]}],\"tools\":[{\"type\":\"function\"}],\"tool_choice\":\"auto\"}");
    prompt_is(&ask, "assistant:|call()[1 tools]assistant:");
}

static void refusals(void **state) {
#define WITH(rest) "{\"messages\":[{\"role\":\"user\",\"content\":\"U\"}]," rest "}"
    static const struct case_bad bad[] = {
        {"{}", "messages", "list of 1 to"},
        {"{\"messages\":[]}", "messages", "list of 1 to"},
        {"{\"messages\":\"x\"}", "messages", "list of 1 to"},
        {"{\"messages\":[5]}", "messages", "object with a role"},
        {"{\"messages\":[{\"content\":\"x\"}]}", "messages", "object with a role"},
        {"{\"messages\":[{\"role\":5,\"content\":\"x\"}]}", "messages", "object with a role"},
        {"{\"messages\":[{\"role\":\"user\"}]}", "messages", "content of a message is missing"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":5}]}", "messages", "string or a list"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":{\"url\":\"x\"}}]}]}",
         "messages", "text only"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]}", "messages", "text only"},
        {"{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"arguments\":\"{\"}}]}]}", "messages",
         "must be JSON"},
        {WITH("\"model\":\"gpt\""), "model", "does not exist"},
        {WITH("\"tools\":[]"), "tools", "not empty"},
        {WITH("\"tools\":{}"), "tools", "must be a list"},
        {WITH("\"tool_choice\":\"required\""), "tool_choice", "not supported"},
        {WITH("\"modalities\":[\"text\",\"audio\"]"), "modalities", "text only"},
        {WITH("\"modalities\":\"text\""), "modalities", "can only be"},
        {WITH("\"functions\":[{\"name\":\"f\"}]"), "functions", "not supported"},
        {WITH("\"function_call\":\"auto\""), "function_call", "not supported"},
        {WITH("\"tool_choice\":{\"type\":\"function\"}"), "tool_choice", "not supported"},
        {WITH("\"response_format\":{\"type\":\"json_schema\"}"), "response_format", "structured output"},
        {WITH("\"chat_template\":\"x\""), "chat_template", "not supported"},
        {WITH("\"chat_template_kwargs\":[1]"), "chat_template_kwargs", "object"},
        {WITH("\"logprobs\":5"), "logprobs", "true or false"},
        {WITH("\"top_logprobs\":5"), "top_logprobs", "when logprobs is true"},
        {WITH("\"logprobs\":true,\"top_logprobs\":21"), "top_logprobs", "from 0 to 20"},
        {WITH("\"max_completion_tokens\":0"), "max_completion_tokens", "from 1"},
        {WITH("\"max_tokens\":90"), "input_tokens", "requested 90 output tokens"},
        {WITH("\"add_generation_prompt\":true,\"continue_final_message\":true"), "continue_final_message", "both"},
        {WITH("\"min_tokens\":99"), "min_tokens", "at most max_tokens"},
    };
    case_refused(ASK_CHAT, bad, sizeof bad / sizeof *bad);
    char body[8192], *at = body + sprintf(body, "{\"messages\":[{\"role\":\"user\",\"content\":\"");
    struct ask ask;
    struct err err;
    memset(at, 'a', 5000);
    strcpy(at + 5000, "\"}]}");
    assert_int_equal(case_try(&ask, ASK_CHAT, body, &err), ERR_INVALID);
    assert_non_null(strstr(err.text, "at least 416 input tokens"));
    ask_deinit(&ask);
    strcpy(at + 500, "\"}]}");
    assert_int_equal(case_try(&ask, ASK_CHAT, body, &err), ERR_INVALID);
    assert_string_equal(err.field, "input_tokens");
    ask_deinit(&ask);
}

#define BODY "{\"messages\":[{\"role\":\"user\",\"content\":\"U\"}]"
#define HEAD "{\"id\":\"id-1\",\"object\":\"chat.completion\",\"created\":1234,\"model\":\"served\",\"choices\":["
#define CHUNK                                                                                                          \
    "data: {\"id\":\"id-1\",\"object\":\"chat.completion.chunk\",\"created\":1234,\"model\":\"served\",\"choices\":["
#define FINGERPRINT "\"system_fingerprint\":\"quire-" QUIRE_VERSION "\","
#define USAGE                                                                                                          \
    "\"usage\":{\"prompt_tokens\":17,\"completion_tokens\":2,\"total_tokens\":19,\"prompt_tokens_details\":{\"cached_" \
    "tokens\":2}}"

static void reply(void **state) {
    struct case_run run;
    case_begin(&run, ASK_CHAT, BODY "}");
    case_event(&run, 0, "x\xFE", "x", FINISH_STOP, STOP_EOS, 257);
    assert_string_equal(
        case_reply(&run),
        HEAD "{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"x\",\"refusal\":null},\"logprobs\":null,"
             "\"finish_reason\":\"stop\",\"stop_reason\":null}]," FINGERPRINT USAGE "}");
    case_end(&run);
    case_begin(&run, ASK_CHAT, BODY ",\"logprobs\":true,\"top_logprobs\":2}");
    case_event(&run, 0, "x\xC3", "x", FINISH_LENGTH, STOP_NONE, 0);
    assert_string_equal(case_reply(&run),
                        HEAD "{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"x\","
                             "\"refusal\":null},\"logprobs\":{\"content\":["
                             "{\"token\":\"x\",\"logprob\":-0.5,\"bytes\":[120],\"top_logprobs\":[{"
                             "\"token\":\"x\",\"logprob\":-0.5,\"bytes\":[120]},"
                             "{\"token\":\"y\",\"logprob\":-1.25,\"bytes\":[121]}]},"
                             "{\"token\":\"\uFFFD\",\"logprob\":-0.5,\"bytes\":[195],\"top_"
                             "logprobs\":[{\"token\":\"\uFFFD\",\"logprob\":-0.5,\"bytes\":[195]},"
                             "{\"token\":\"\uFFFD\",\"logprob\":-1.25,\"bytes\":[196]}]}]},"
                             "\"finish_reason\":\"length\",\"stop_reason\":null}]," FINGERPRINT USAGE "}");
    case_end(&run);
}

static void stream(void **state) {
    struct case_run run;
    case_begin(&run, ASK_CHAT, BODY ",\"stream\":true,\"stream_options\":{\"include_usage\":true}}");
    case_event(&run, 0, "x", "x", FINISH_NONE, STOP_NONE, 0);
    assert_string_equal(case_chunk(&run, 0),
                        CHUNK "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"x\"},\"logprobs\":null,"
                              "\"finish_reason\":null}]}\n\n");
    case_event(&run, 0, "y", "y", FINISH_LENGTH, STOP_NONE, 0);
    assert_string_equal(case_chunk(&run, 0), CHUNK "{\"index\":0,\"delta\":{\"content\":\"y\"},\"logprobs\":null,"
                                                   "\"finish_reason\":\"length\",\"stop_reason\":null}]}\n\n");
    assert_string_equal(case_finish(&run), CHUNK "]," USAGE "}\n\ndata: [DONE]\n\n");
    case_end(&run);
    case_begin(&run, ASK_CHAT, BODY ",\"stream\":true,\"logprobs\":true}");
    case_event(&run, 0, "\xFE", "", FINISH_STOP, STOP_EOS, 257);
    assert_string_equal(case_chunk(&run, 0), CHUNK
                        "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":{\"content\":["
                        "{\"token\":\"</s>\",\"logprob\":-0.5,\"bytes\":[60,47,115,62],\"top_logprobs\":[]}]},"
                        "\"finish_reason\":\"stop\",\"stop_reason\":null}]}\n\n");
    assert_string_equal(case_finish(&run), "data: [DONE]\n\n");
    case_end(&run);
}

/* Log-probabilities as JSON are long, with a list of numbers for each name: fewer tokens are allowed with them. */
static void longest(void **state) {
    struct ask_view view = case_view();
    struct ask ask;
    struct err err = {0};
    const char *plain = "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"max_tokens\":100000}",
               *rich = "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"max_tokens\":100000,"
                       "\"logprobs\":true,\"top_logprobs\":20}",
               *unsaid = "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"logprobs\":true,"
                         "\"top_logprobs\":20,\"n\":3,\"temperature\":1}";
    view.max_model_len = 1 << 20;
    assert_int_equal(ask_prepare(&ask, &view, ASK_CHAT, plain, strlen(plain), &err), 0);
    ask_deinit(&ask);
    assert_int_equal(ask_prepare(&ask, &view, ASK_CHAT, rich, strlen(rich), &err), ERR_INVALID);
    assert_string_equal(err.field, "max_tokens");
    assert_non_null(strstr(err.text, "with these log-probabilities, got 100000"));
    ask_deinit(&ask);
    assert_int_equal(ask_prepare(&ask, &view, ASK_CHAT, unsaid, strlen(unsaid), &err), 0); /* shortened instead */
    int64_t all = 3 * (int64_t)ask.requests[0]->max_tokens * ask_token_bytes(&ask, &view);
    assert_true(all <= ASK_ANSWER_BYTES_MAX && all > ASK_ANSWER_BYTES_MAX * 9 / 10);
    ask_deinit(&ask);
}

static void bounded(void **state) {
    case_bounded(ASK_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],"
                           "\"logprobs\":true,\"top_logprobs\":2}");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages), cmocka_unit_test(refusals), cmocka_unit_test(reply),
        cmocka_unit_test(stream),   cmocka_unit_test(longest),  cmocka_unit_test(bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
