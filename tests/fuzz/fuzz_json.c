/* JSON reading and writing: the reader and the tree agree on what is JSON; what a tree says is written and read back;
 * any bytes become a strict string. */
#include <cjson/cJSON.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/check.h"
#include "engine/base/json.h"

static bool reads(const char *text, size_t bytes, bool *has_nul) {
    struct json_reader reader;
    enum json_token token;
    size_t tokens = 0;
    json_reader_init(&reader, text, bytes, json_limits_request);
    while ((token = json_next(&reader)) != JSON_END && token != JSON_ERROR) {
        CHECK(++tokens <= 2 * bytes + 2);
        if (token == JSON_KEY || token == JSON_STRING) *has_nul |= memchr(reader.str, 0, reader.str_bytes) != NULL;
        if (token == JSON_NUMBER) {
            double value;
            int64_t whole;
            CHECK(!json_number_i64(reader.str, reader.str_bytes, &whole) ||
                  json_number_f64(reader.str, reader.str_bytes, &value));
        }
    }
    CHECK(token == JSON_END || reader.err.text[0]);
    json_reader_deinit(&reader);
    return token == JSON_END;
}

static void members_read(const struct cJSON *tree) {
    int64_t i = 0;
    uint64_t u = 0;
    double d = 0;
    bool b = false;
    const char *s = "";
    struct err err;
    json_read_i64(tree, "a", -5, 1 << 20, &i, &err);
    json_read_u64(tree, "a", UINT64_MAX, &u, &err);
    json_read_f64(tree, "a", -1e9, 1e9, &d, &err);
    json_read_bool(tree, "a", &b, &err);
    json_read_str(tree, "a", &s, &err);
    CHECK(i >= -5 && i <= 1 << 20 && d >= -1e9 && d <= 1e9);
}

static void writes(const char *text, size_t bytes) {
    struct buf out = {0};
    struct json_reader reader;
    double value = 0;
    json_write_str(&out, text, bytes);
    json_reader_init(&reader, out.data, out.bytes, json_limits_request);
    CHECK(json_next(&reader) == JSON_STRING && json_next(&reader) == JSON_END);
    json_reader_deinit(&reader);
    buf_clear(&out);
    memcpy(&value, text, bytes < sizeof value ? bytes : sizeof value);
    json_write_f64(&out, value);
    bool has_nul = false;
    CHECK(reads(out.data, out.bytes, &has_nul));
    buf_deinit(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const char *text = (const char *)data;
    struct cJSON *tree = NULL;
    struct err err = {0};
    bool has_nul = false, ok = reads(text, bytes, &has_nul);
    int rc = json_parse(text, bytes, json_limits_request, &tree, &err);
    CHECK(rc == 0 ? ok && !has_nul : err.text[0] != '\0');
    CHECK(!ok || rc == 0 || has_nul || strstr(err.text, "twice"));
    if (rc == 0) {
        char *printed = cJSON_PrintUnformatted(tree);
        members_read(tree);
        CHECK(printed && reads(printed, strlen(printed), &has_nul));
        cJSON_free(printed);
        cJSON_Delete(tree);
    }
    writes(text, bytes);
    return 0;
}
