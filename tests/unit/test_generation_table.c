/* The table of running requests against a plain array, through many puts and removals. */
#include "server/generation_table.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#define IDS 3000

static void agrees_with_array(void **state) {
    static struct generation *have[IDS];
    struct table table;
    uint64_t x = 1;
    table_init(&table);
    memset(have, 0, sizeof have);
    assert_null(table_find(&table, 0));
    for (int round = 0; round < 200000; round++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        uint64_t id = 1 + x % (IDS - 1);
        if (round % 2 && have[id]) {
            table_remove(&table, id);
            have[id] = NULL;
        } else if (!have[id]) {
            have[id] = (struct generation *)(uintptr_t)(id * 8);
            table_put(&table, id, have[id]);
        } else {
            table_remove(&table, id + IDS); /* not there: nothing happens */
        }
        assert_ptr_equal(table_find(&table, id), have[id]);
    }
    size_t count = 0;
    for (uint64_t id = 1; id < IDS; id++) {
        assert_ptr_equal(table_find(&table, id), have[id]);
        count += have[id] != NULL;
    }
    assert_int_equal(table.count, count);
    table_deinit(&table);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(agrees_with_array)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
