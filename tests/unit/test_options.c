/* Flags: the table against itself, the order of sources, bounds and the sentences for mistakes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/backend.h"
#include "server/options_table.h"
#include "server/route.h"

#define ARGS(...)                                                                                                      \
    (char *const[]) {                                                                                                  \
        __VA_ARGS__                                                                                                    \
    }
#define PARSE(options, err, ...)                                                                                       \
    options_parse(options, (int)(sizeof(ARGS(__VA_ARGS__)) / sizeof(char *)), ARGS(__VA_ARGS__), err)

static void test_defaults(void **state) {
    struct options o;
    struct err err = {0};
    assert_int_equal(options_parse(&o, 0, NULL, &err), 0);
    assert_string_equal(o.host, "127.0.0.1");
    assert_int_equal(o.port, 8000);
    assert_int_equal(o.block_size, 64);
    assert_int_equal(o.max_num_seqs, 0);
    assert_int_equal(o.max_body_bytes, 16 * 1024 * 1024);
    assert_true(o.enable_prefix_caching);
    assert_true(o.enable_chunked_prefill);
    assert_false(o.metrics_auth);
    assert_null(o.model);
    assert_int_equal(o.device, DEVICE_AUTO);
    assert_int_equal(o.cpu_activations, CPU_ACTIVATIONS_INT8);
    assert_int_equal(o.changed.bytes, 0);
    options_deinit(&o);
}

static void test_values(void **state) {
    struct options o;
    struct err err = {0};
    assert_int_equal(PARSE(&o, &err, "model.gguf", "--port", "9000", "--max_model_len=4K", "--no-enable-prefix-caching",
                           "--served-model-name", "a", "b", "--block-size", "128", "--kv-cache-memory-bytes", "1.5G",
                           "--gpu-memory-utilization=0.25", "--device", "cpu", "--seed", "18446744073709551615",
                           "--cpu-activations=f32", "--enable-log-requests", "--metrics-auth=false"),
                     0);
    assert_string_equal(o.model, "model.gguf");
    assert_int_equal(o.port, 9000);
    assert_int_equal(o.max_model_len, 4096);
    assert_false(o.enable_prefix_caching);
    assert_int_equal(o.served_names.count, 2);
    assert_string_equal(o.served_names.items[1], "b");
    assert_int_equal(o.block_size, 128);
    assert_int_equal(o.kv_cache_memory_bytes, 1536l * 1024 * 1024);
    assert_true(o.gpu_memory_utilization == 0.25);
    assert_int_equal(o.device, DEVICE_CPU);
    assert_true(o.seed == UINT64_MAX);
    assert_int_equal(o.cpu_activations, CPU_ACTIVATIONS_F32);
    assert_true(o.enable_log_requests);
    assert_false(o.metrics_auth);
    assert_non_null(strstr(o.changed.data, "port=9000"));
    options_deinit(&o);
    assert_int_equal(PARSE(&o, &err, "--device", "cuda:3", "--cuda-kernels", "portable", "--batch-invariant",
                           "--max-num-mixed-tokens", "1K"),
                     0);
    assert_int_equal(o.device, DEVICE_CUDA);
    assert_int_equal(o.device_count, 1);
    assert_int_equal(o.devices[0], 3);
    assert_int_equal(o.cuda_kernels, OPTION_KERNELS_PORTABLE);
    assert_true(o.batch_invariant);
    assert_int_equal(o.max_num_mixed_tokens, 1024);
    options_deinit(&o);
    assert_int_equal(PARSE(&o, &err, "--device=cuda:2", "--device=cuda"), 0);
    assert_int_equal(o.device_count, 0);
    options_deinit(&o);
    assert_int_equal(PARSE(&o, &err, "--data-parallel-size", "2", "--tensor-parallel-size=2", "--device",
                           "cuda:3,1,0,7", "--step-timeout", "2.5", "--no-engine-process", "--routing-policy",
                           "round-robin", "--session-header", "X-Session-ID"),
                     0);
    static const int32_t devices[] = {3, 1, 0, 7};
    assert_int_equal(o.device_count, 4);
    assert_memory_equal(o.devices, devices, sizeof devices);
    assert_int_equal(o.data_parallel_size, 2);
    assert_int_equal(o.tensor_parallel_size, 2);
    assert_true(o.step_timeout_s == 2.5);
    assert_false(o.engine_process);
    assert_int_equal(o.routing_policy, ROUTE_ROUND_ROBIN);
    assert_string_equal(o.session_header, "x-session-id");
    options_deinit(&o);
    assert_int_equal(PARSE(&o, &err, "--tensor-parallel-size", "auto"), 0);
    assert_int_equal(o.tensor_parallel_size, 0);
    assert_int_equal(o.routing_policy, ROUTE_PREFIX);
    assert_null(o.session_header);
    options_deinit(&o);
    assert_int_equal(PARSE(&o, &err, "--enable-log-requests", "--disable-log-requests"), 0);
    assert_false(o.enable_log_requests);
    options_deinit(&o);
}

/* Every one is refused with a sentence that holds the second string. */
static void test_mistakes(void **state) {
    static const char *const cases[][3] = {
        {"--prot", "1", "did you mean --port?"},
        {"--max-num-sequences", "1", "did you mean --max-num-seqs?"},
        {"--xyzzy", "1", "quire serve --help"},
        {"--port", "65536", "from 0 to 65535"},
        {"--port", "80x", "whole number"},
        {"--port", "1.5", "whole number"},
        {"--port", "0x50", "whole number"},
        {"--port", "", "whole number"},
        {"--port", "nan", "whole number"},
        {"--port", "--host", "needs a value"},
        {"--block-size", "48", "16, 32, 64, 128"},
        {"--device", "gpu", "auto, cpu, cuda, cuda:N or cuda:N,N... with numbers from 0 to 1023, not \"gpu\""},
        {"--device", "cuda:0,1,x", "cuda:N,N..."},
        {"--device", "cuda:0,", "cuda:N,N..."},
        {"--device", "cuda:0,1,0", "names cuda:0 twice"},
        {"--device", "cuda:", "cuda:N"},
        {"--device", "cuda:1x", "cuda:N"},
        {"--device", "cuda:-1", "cuda:N"},
        {"--device", "cuda:99999999999999999999", "cuda:N"},
        {"--cuda-kernels", "sm_80", "auto, sm_90a, portable"},
        {"--max-num-mixed-tokens", "0", "from 1 to 65536"},
        {"--gpu-memory-utilization", "1.1", "from 0.01 to 1"},
        {"--seed", "-1", "2^64-1"},
        {"--seed", "18446744073709551616", "2^64-1"},
        {"--tensor-parallel-size", "0", "from 1 to 64"},
        {"--tensor-parallel-size", "some", "takes auto or a whole number from 1 to 64"},
        {"--data-parallel-size", "65", "from 1 to 64"},
        {"--step-timeout", "0", "from 0.1 to 3600"},
        {"--routing-policy", "random", "prefix, least-loaded, round-robin"},
        {"--session-header", "X Session", "the name of a header field"},
        {"--metrics-auth=maybe", "x", "true or false"},
        {"--no-metrics-auth=true", "x", "takes no value"},
        {"--no-port", "1", "no flag --no-port"},
        {"--api-key-file", "/nonexistent/keys", "cannot read"},
        {"--no-enable-chunked-prefill", "x", "always computed in chunks"},
        {"-p", "1", "there is no flag -p"},
        {"a", "b", "second one"},
        {"--host", "", "empty value"},
        {"--max-num-seqs", "0", "from 1 to 4096"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct options o;
        struct err err = {0};
        int code = PARSE(&o, &err, (char *)cases[i][0], (char *)cases[i][1]);
        if (code == 0 || !strstr(err.text, cases[i][2]))
            fail_msg("%s %s: %d \"%s\"", cases[i][0], cases[i][1], code, err.text);
        options_deinit(&o);
    }
    struct options o;
    struct err err = {0};
    assert_int_not_equal(PARSE(&o, &err, "--port"), 0);
    assert_non_null(strstr(err.text, "needs a value"));
    options_deinit(&o);
}

/* More devices than there are: the arithmetic. */
static void test_devices(void **state) {
    struct options o;
    struct err err = {0};
    assert_int_equal(
        PARSE(&o, &err, "--device", "cuda:0,1,2", "--data-parallel-size", "2", "--tensor-parallel-size", "2"),
        ERR_INVALID);
    assert_non_null(
        strstr(err.text, "--data-parallel-size 2 x --tensor-parallel-size 2 = 4 devices, and --device names 3"));
    options_deinit(&o);
    assert_int_equal(PARSE(&o, &err, "--data-parallel-size", "9", "--tensor-parallel-size", "8"), ERR_INVALID);
    assert_non_null(strstr(err.text, "= 72 devices, at most 64"));
    options_deinit(&o);
}

static void test_environment(void **state) {
    struct options o;
    struct err err = {0};
    setenv("QUIRE_PORT", "7000", 1);
    setenv("QUIRE_ENABLE_PREFIX_CACHING", "off", 1);
    setenv("QUIRE_SERVED_MODEL_NAME", "x,y", 1);
    setenv("VLLM_API_KEY", "secret", 1);
    assert_int_equal(PARSE(&o, &err, "--served-model-name", "z"), 0);
    assert_int_equal(o.port, 7000);
    assert_false(o.enable_prefix_caching);
    assert_int_equal(o.served_names.count, 1); /* the line replaces the environment */
    assert_string_equal(o.served_names.items[0], "z");
    assert_int_equal(o.api_keys.count, 1);
    assert_null(strstr(o.changed.data, "secret"));
    options_deinit(&o);
    assert_int_equal(PARSE(&o, &err, "--port", "7001"), 0);
    assert_int_equal(o.port, 7001);
    assert_int_equal(o.served_names.count, 2);
    options_deinit(&o);
    setenv("QUIRE_PORT", "seventy", 1);
    assert_int_not_equal(options_parse(&o, 0, NULL, &err), 0);
    assert_non_null(strstr(err.text, "QUIRE_PORT takes"));
    options_deinit(&o);
    unsetenv("QUIRE_PORT");
    unsetenv("QUIRE_ENABLE_PREFIX_CACHING");
    unsetenv("QUIRE_SERVED_MODEL_NAME");
    unsetenv("VLLM_API_KEY");
}

static void test_key_file(void **state) {
    struct options o;
    struct err err = {0};
    char path[] = "/tmp/quire_keys_XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, "one\r\n\ntwo\n", 10), 10);
    close(fd);
    assert_int_equal(PARSE(&o, &err, "--api-key", "zero", "--api-key-file", path), 0);
    assert_int_equal(o.api_keys.count, 3);
    assert_string_equal(o.api_keys.items[1], "one");
    assert_string_equal(o.api_keys.items[2], "two");
    options_deinit(&o);
    unlink(path);
}

static void test_table(void **state) {
    struct buf help = {0};
    options_help(&help);
    assert_true(option_row_count < 128);
    for (int32_t i = 0; i < option_row_count; i++) {
        const struct option_row *row = &option_rows[i];
        char flag[96];
        snprintf(flag, sizeof flag, row->kind == OPTION_BOOL ? "--[no-]%s" : "--%s", row->flag);
        assert_non_null(strstr(help.data, flag));
        assert_true(row->help[0] && row->group[0] && strlen(row->flag) < 60);
        for (int32_t k = 0; k < i; k++) assert_string_not_equal(row->flag, option_rows[k].flag);
        if (row->kind == OPTION_CHOICE || row->kind == OPTION_CHOICE_I32) assert_non_null(row->choices[0]);
        assert_true(row->kind == OPTION_F64 || row->min <= row->max);
    }
    buf_deinit(&help);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults), cmocka_unit_test(test_values),      cmocka_unit_test(test_mistakes),
        cmocka_unit_test(test_devices),  cmocka_unit_test(test_environment), cmocka_unit_test(test_key_file),
        cmocka_unit_test(test_table),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
