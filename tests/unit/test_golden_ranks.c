/* The default model over three ranks (9 heads, 3 KV heads), as a whole engine: what was recorded of another
 * implementation (tests/golden/README.md). Skipped when the model file is not there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cjson/cJSON.h>
#include <cmocka.h>

#include "engine/base/json.h"
#include "tests/unit/engine_client.h"
#include "tests/unit/model_path.h"

/* ---- the default model --------------------------------------------------------------------------------------------
 */

static int32_t read_ids(const cJSON *array, int32_t *out, int32_t room) {
    int32_t count = 0;
    for (const cJSON *item = array->child; item && count < room; item = item->next)
        out[count++] = (int32_t)item->valuedouble;
    return count;
}

/* Greedy along the recorded path, until the two best tokens there are so close that rounding chooses. */
static void golden_compare(const cJSON *golden, const struct sample *got, int32_t *equal) {
    int32_t ids[TOKENS_MAX];
    const int32_t count = read_ids(json_get(golden, "greedy_ids"), ids, TOKENS_MAX);
    const cJSON *margin = json_get(golden, "margins")->child;
    for (int32_t i = 0; i < count && i < got->count; i++, margin = margin->next) {
        if (got->ids[i] == ids[i]) {
            ++*equal;
            continue;
        }
        if (margin->valuedouble >= 0.03)
            fail_msg("%s: token %d is %d, recorded was %d by a margin of %g", json_get(golden, "name")->valuestring, i,
                     got->ids[i], ids[i], margin->valuedouble);
        return;
    }
}

static void golden_ask(struct engine *engine, const cJSON *golden, int32_t id) {
    static int32_t prompt[1024];
    struct request *request;
    struct err err = {0};
    const struct request_parts parts = {.head = {.flags = REQUEST_NO_TEXT | REQUEST_IGNORE_EOS,
                                                 .id = (uint64_t)id,
                                                 .n = 1,
                                                 .max_tokens = cJSON_GetArraySize(json_get(golden, "greedy_ids")),
                                                 .logprobs = -1,
                                                 .sampling = {.top_p = 1, .typical_p = 1, .repetition_penalty = 1}},
                                        .prompt = prompt,
                                        .prompt_count = read_ids(json_get(golden, "prompt_ids"), prompt, 1024)};
    if (request_build(&parts, &request, &err) || engine_submit(engine, request, &err)) fail_msg("%s", err.text);
    mem_free(request);
}

static void test_default_model(void **state) {
    static struct client c;
    char path[512], *line = NULL;
    size_t room = 0;
    cJSON *golden[REQUESTS_MAX];
    int32_t count = 0, equal = 0, tokens = 0;
    struct err err = {0};
    FILE *f = fopen("tests/golden/smollm2.jsonl", "r");
    assert_non_null(f);
    while (getline(&line, &room, f) > 0 && count < REQUESTS_MAX)
        assert_int_equal(json_parse(line, strlen(line), json_limits_file, &golden[count++], &err), 0);
    free(line);
    fclose(f);
    if (model_path(path, sizeof path)) {
        struct engine *engine =
            engine_start(path, &c, 3, (struct engine_options){.block_size = 64, .max_model_len = 1024});
        for (int32_t i = 0; i < count; i++) golden_ask(engine, golden[i], i);
        client_wait(&c, count);
        engine_end(engine, &c);
        for (int32_t i = 0; i < count; i++) {
            golden_compare(golden[i], &c.samples[i][0], &equal);
            tokens += c.samples[i][0].count;
        }
        print_message("3 ranks: %d of %d tokens as recorded\n", equal, tokens);
        assert_true(equal * 10 > tokens * 8);
    }
    for (int32_t i = 0; i < count; i++) cJSON_Delete(golden[i]);
    if (!tokens) skip();
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_default_model)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
