/* test_sim.c: a short run of the simulator, and that it reaches what it is meant to reach. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "tests/sim/sim.c"

static void runs_hold_the_invariants(void **state) {
    struct sim_coverage c = {0};
    char text[1024];
    (void)state;
    for (uint64_t seed = 1; seed <= 120; seed++)
        if (!sim_run(seed, 150, &c, text, sizeof text)) fail_msg("%s", text);
    assert_int_equal(c.seeds, 120);
    assert_true(c.steps >= 100 * 100 && c.tokens > 0 && c.hit_tokens > 0 && c.preemptions > 0 && c.stalls > 0);
    assert_true(c.copies > 0 && c.takeovers > 0 && c.evictions > 0 && c.forgets > 0 && c.cancels > 0);
    assert_true(c.deadlines > 0 && c.faults > 0 && c.stops > 0 && c.lengths > 0 && c.shutdowns > 0);
    assert_true(c.ended_by_engine > 0 && c.refused_size > 0 && c.refused_queue > 0 && c.keys_told > 0);
}

static void a_seed_is_a_run(void **state) {
    struct sim_coverage a = {0}, b = {0};
    char text[1024];
    (void)state;
    assert_true(sim_run(7, 300, &a, text, sizeof text));
    assert_true(sim_run(7, 300, &b, text, sizeof text));
    assert_memory_equal(&a, &b, sizeof a);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(runs_hold_the_invariants),
        cmocka_unit_test(a_seed_is_a_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
