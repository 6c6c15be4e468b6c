/* Fuzzing of the transport over a connection without sockets: any bytes, any split. The same bytes are fed whole and in
 * pieces chosen by the input; the replies must be the same, every request handed out must end once, and nothing may be
 * left over. */
#include <stdlib.h>

#include "engine/base/check.h"
#include "tests/fake/wire.h"

static void run(const uint8_t *data, size_t bytes, uint32_t seed, bool split, bool end, struct wire *w) {
    struct http_limits limits = http_limits_default;
    limits.header_bytes = 2048;
    limits.header_fields = 12;
    limits.body_bytes = 512;
    limits.body_total_bytes = 400;
    limits.chunks = 16;
    limits.output_bytes = 1 << 20;
    wire_open(w, &limits);
    for (size_t at = 0; at < bytes;) {
        seed = seed * 1664525u + 1013904223u;
        size_t take = split ? 1 + (seed >> 24) % 40 : bytes - at;
        if (take > bytes - at) take = bytes - at;
        wire_feed(w, (const char *)data + at, take);
        at += take;
    }
    wire_settle(w);
    if (end) http_conn_eof(&w->conn);
    CHECK(w->waiting == NULL);
    CHECK(w->done >= w->requests);
    CHECK(w->core.body_bytes <= limits.body_total_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    struct wire whole, split;
    if (bytes < 1 || bytes > 16384) return 0;
    uint32_t seed = data[0];
    data++;
    bytes--;
    run(data, bytes, seed, false, seed & 1, &whole);
    run(data, bytes, seed, true, seed & 1, &split);
    CHECK(whole.requests == split.requests && whole.refused == split.refused && whole.done == split.done);
    CHECK(whole.conn.state == split.conn.state);
    CHECK(whole.out.bytes == split.out.bytes);
    CHECK(whole.out.bytes == 0 || memcmp(whole.out.data, split.out.data, whole.out.bytes) == 0);
    wire_close(&whole);
    wire_close(&split);
    CHECK(whole.core.body_bytes == 0);
    return 0;
}
