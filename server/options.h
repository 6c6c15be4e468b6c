/* options.h: every flag of `quire serve` as one plain struct, filled from one table (flag, environment name, type,
 * bounds, default, help). Read once at start by the main thread, immutable afterwards, so any thread may read it. Knows
 * no engine and no socket: values that depend on the device stay "auto" here and are settled in cmd_serve.c. */
#ifndef QUIRE_SERVER_OPTIONS_H
#define QUIRE_SERVER_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/err.h"

#define OPTIONS_LIST_MAX     32
#define OPTIONS_DEVICES_MAX  64
#define OPTIONS_REPLICAS_MAX 64

/* Values of a flag that takes several; the strings live as long as the options. */
struct option_list {
    const char *items[OPTIONS_LIST_MAX];
    int32_t count;
};

enum option_generation_config {
    GENERATION_CONFIG_AUTO,
    GENERATION_CONFIG_VLLM
}; /* vllm: the model's defaults are not used */
enum option_kv_dtype { OPTION_KV_AUTO, OPTION_KV_F16, OPTION_KV_F32, OPTION_KV_BF16, OPTION_KV_FP8 };
enum option_load_format { LOAD_FORMAT_AUTO, LOAD_FORMAT_DUMMY, LOAD_FORMAT_SAFETENSORS };
enum option_dtype { OPTION_DTYPE_AUTO, OPTION_DTYPE_F32, OPTION_DTYPE_F16, OPTION_DTYPE_BF16 };
enum option_cuda_kernels { OPTION_KERNELS_AUTO, OPTION_KERNELS_SM90A, OPTION_KERNELS_PORTABLE };
enum option_routing { OPTION_ROUTING_PREFIX, OPTION_ROUTING_LEAST_LOADED, OPTION_ROUTING_ROUND_ROBIN };

struct options {
    /* Model */
    const char *model;               /* as given: file, folder or hub id; NULL: the default model */
    struct option_list served_names; /* --served-model-name; the first is the one in replies; empty: from the model */
    const char *chat_template;       /* a file, or NULL */
    int32_t generation_config;       /* enum option_generation_config */
    int32_t load_format;             /* enum option_load_format */
    int32_t dtype;                   /* enum option_dtype */
    int32_t max_model_len;           /* 0: from the model */
    uint64_t seed;

    /* Scheduler; 0: settled by the device */
    int32_t max_num_seqs, max_num_batched_tokens, max_num_mixed_tokens, max_num_queued_reqs;
    int32_t long_prefill_token_threshold;
    bool enable_chunked_prefill;
    int32_t max_logprobs; /* most `logprobs` a request may ask for */

    /* Cache */
    int32_t block_size;     /* 16, 32, 64, 128 */
    int32_t kv_cache_dtype; /* enum option_kv_dtype */
    size_t kv_cache_memory_bytes;
    double gpu_memory_utilization; /* 0: settled by the device */
    bool enable_prefix_caching;

    /* Device */
    int32_t device;                       /* enum device_kind */
    int32_t devices[OPTIONS_DEVICES_MAX]; /* of cuda:N,N…, each once */
    int32_t device_count;                 /* 0: none named, taken in order from 0 */
    int32_t cuda_kernels;                 /* enum option_cuda_kernels */
    bool batch_invariant;
    int32_t threads;         /* of all replicas together; 0: one a core */
    int32_t cpu_activations; /* enum cpu_activations */
    bool enforce_eager;

    /* Replicas: data_parallel_size copies of the model, each over tensor_parallel_size devices */
    int32_t data_parallel_size, tensor_parallel_size; /* tensor 0: auto */
    double step_timeout_s;
    bool engine_process;
    int32_t routing_policy;     /* enum option_routing, which is enum route_policy */
    const char *session_header; /* in lower case, or NULL */

    /* Server */
    const char *host;
    int32_t port;
    struct option_list api_keys; /* --api-key and --api-key-file; empty: open */
    bool metrics_auth;           /* /metrics asks for the key too */
    bool enable_log_requests;
    int32_t log_level; /* enum log_level */
    int32_t shutdown_timeout_s, request_timeout_s /* 0: no deadline */, keep_alive_timeout_s;
    size_t max_body_bytes, max_header_bytes, max_output_bytes;
    int32_t max_connections;

    int argc; /* as given, for the engines' own command lines */
    char *const *argv;
    struct buf changed; /* "flag=value …" of what was given, keys left out; for the log */
    char **_owned;      /* private: strings made here */
    int32_t _owned_count;
};

/* Fills `options` from defaults, then the environment, then the arguments after the command word. ERR_INVALID with one
 * sentence: which flag, what was expected, what it may have been meant to be. Deinit also after an error. */
int options_parse(struct options *options, int argc, char *const *argv, struct err *err);
void options_deinit(struct options *options);

/* The text of `quire serve --help`, made from the table. */
void options_help(struct buf *out);

#endif
