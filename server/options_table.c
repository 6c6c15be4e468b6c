#include "server/options_table.h"

#include <stddef.h>

#define AT(field) offsetof(struct options, field)
#define KIB       1024.0
#define MIB       (1024.0 * KIB)
#define TIB       (1024.0 * 1024.0 * MIB)

/* clang-format off */
const struct option_row option_rows[] = {
    {"model", OPTION_STRING, AT(model), 0, 0, NULL, {0}, "MODEL",
     "the same as the argument MODEL: a GGUF file, a folder, or a hub id found in the local cache", "Model"},
    {"served-model-name", OPTION_LIST, AT(served_names), 0, 0, NULL, {0}, "NAME ...",
     "names that requests may use; the first stands in replies (from the model when not given)", "Model"},
    {"chat-template", OPTION_STRING, AT(chat_template), 0, 0, NULL, {0}, "FILE",
     "a Jinja file that replaces the model's chat template", "Model"},
    {"generation-config", OPTION_CHOICE, AT(generation_config), 0, 0, "auto", {"auto", "vllm"}, NULL,
     "auto: what a request leaves out comes from the model's generation defaults; vllm: never", "Model"},
    {"load-format", OPTION_CHOICE, AT(load_format), 0, 0, "auto", {"auto", "dummy", "safetensors"}, NULL,
     "auto: what MODEL is; dummy: shapes from the files, random numbers for weights, a config.json alone is enough "
     "then; safetensors: auto for a folder, and no GGUF file",
     "Model"},
    {"dtype", OPTION_CHOICE, AT(dtype), 0, 0, "auto", {"auto", "float32", "float16", "bfloat16"}, NULL,
     "dtype of activations; the CPU computes in float32, CUDA in bfloat16, and each refuses the others", "Model"},
    {"max-model-len", OPTION_I32, AT(max_model_len), 1, 1 << 20, NULL, {0}, "TOKENS",
     "longest prompt and output together (from the model when not given)", "Model"},
    {"seed", OPTION_U64, AT(seed), 0, 18446744073709549568.0, "0", {0}, "N",
     "of the random weights of --load-format dummy and of requests without a seed of their own", "Model"},

    {"max-num-seqs", OPTION_I32, AT(max_num_seqs), 1, 4096, NULL, {0}, "N",
     "most sequences computed at once (CPU: 64, CUDA: 1024)", "Scheduler"},
    {"max-num-batched-tokens", OPTION_I32, AT(max_num_batched_tokens), 16, 65536, NULL, {0}, "TOKENS",
     "most tokens computed in one step; smaller means shorter gaps in streams (CPU: 256, CUDA: 8192)", "Scheduler"},
    {"max-num-mixed-tokens", OPTION_I32, AT(max_num_mixed_tokens), 1, 65536, NULL, {0}, "TOKENS",
     "most tokens of a step that computes prompts beside running requests, whose streams wait for it (CUDA: 2048); as "
     "many as --max-num-batched-tokens: no limit of its own",
     "Scheduler"},
    {"max-num-queued-reqs", OPTION_I32, AT(max_num_queued_reqs), 1, 1 << 20, "1024", {0}, "N",
     "most requests waiting; above it 429 with Retry-After", "Scheduler"},
    {"long-prefill-token-threshold", OPTION_I32, AT(long_prefill_token_threshold), 0, 1 << 20, "0", {0}, "TOKENS",
     "most prompt tokens of one request in a step; 0: no limit of its own", "Scheduler"},
    {"enable-chunked-prefill", OPTION_BOOL, AT(enable_chunked_prefill), 0, 0, "true", {0}, NULL,
     "prompts are always computed in chunks between decode steps; the negative is refused", "Scheduler"},
    {"max-logprobs", OPTION_I32, AT(max_logprobs), 0, 20, "20", {0}, "N",
     "most log-probabilities a request may ask for at each token", "Scheduler"},

    {"block-size", OPTION_CHOICE_I32, AT(block_size), 0, 0, "64", {"16", "32", "64", "128"}, NULL,
     "tokens in a page of the KV cache", "Cache"},
    {"kv-cache-dtype", OPTION_CHOICE, AT(kv_cache_dtype), 0, 0, "auto", {"auto", "f16", "f32", "bf16", "fp8"}, NULL,
     "auto is f16 on the CPU, which takes f32 too, and bf16 on CUDA, which takes no other; none takes fp8", "Cache"},
    {"kv-cache-memory-bytes", OPTION_BYTES, AT(kv_cache_memory_bytes), 0, TIB, "0", {0}, "BYTES",
     "size of the KV cache; 0: planned from memory", "Cache"},
    {"gpu-memory-utilization", OPTION_F64, AT(gpu_memory_utilization), 0.01, 1, NULL, {0}, "SHARE",
     "share of the GPU's memory that the server may take (0.92); on the CPU of the memory that is free (0.5)", "Cache"},
    {"enable-prefix-caching", OPTION_BOOL, AT(enable_prefix_caching), 0, 0, "true", {0}, NULL,
     "keep pages of finished requests and share them by prefix", "Cache"},

    {"device", OPTION_DEVICE, AT(device), 0, 0, "auto", {"auto", "cpu", "cuda"}, "auto|cpu|cuda[:N,N...]",
     "auto takes GPUs if there are any and this build knows them; cuda:1 is the second one, cuda:2,3 are the third and "
     "the fourth; replicas take them in this order",
     "Device"},
    {"cuda-kernels", OPTION_CHOICE, AT(cuda_kernels), 0, 0, "auto", {"auto", "sm_90a", "portable"}, NULL,
     "kernels for the GPU at hand, or those that any GPU from compute capability 8.0 on runs", "Device"},
    {"batch-invariant", OPTION_BOOL, AT(batch_invariant), 0, 0, "false", {0}, NULL,
     "a request's numbers never depend on its neighbours; always so on the CPU, slower on a GPU", "Device"},
    {"threads", OPTION_I32, AT(threads), 1, 1024, NULL, {0}, "N",
     "threads that compute on the CPU, of all replicas together (one a core when not given)", "Device"},
    {"cpu-activations", OPTION_CHOICE, AT(cpu_activations), 0, 0, "int8", {"int8", "f32"}, NULL,
     "how the CPU multiplies quantised weights: activations rounded to int8 in blocks, or kept in f32", "Device"},
    {"enforce-eager", OPTION_BOOL, AT(enforce_eager), 0, 0, "false", {0}, NULL,
     "no CUDA graphs; the CPU has none, so there it says so in the log and changes nothing", "Device"},

    {"data-parallel-size", OPTION_I32, AT(data_parallel_size), 1, OPTIONS_REPLICAS_MAX, "1", {0}, "D",
     "replicas: copies of the model, each with an engine process and devices of its own", "Replicas"},
    {"tensor-parallel-size", OPTION_I32_AUTO, AT(tensor_parallel_size), 1, OPTIONS_DEVICES_MAX, "1", {0}, "T|auto",
     "devices one copy of the model is spread over; auto: as few as hold it, and replicas on the others", "Replicas"},
    {"step-timeout", OPTION_F64, AT(step_timeout_s), 0.1, 3600, "10", {0}, "SECONDS",
     "an engine whose step takes longer is taken for dead and started again", "Replicas"},
    {"engine-process", OPTION_BOOL, AT(engine_process), 0, 0, "true", {0}, NULL,
     "engines are processes of their own; the negative, for debugging, makes them threads, and one that crashes takes "
     "all along",
     "Replicas"},
    {"routing-policy", OPTION_CHOICE, AT(routing_policy), 0, 0, "prefix", {"prefix", "least-loaded", "round-robin"},
     NULL,
     "which replica gets a request: the one with the longest cached prefix unless its load is far above the others', "
     "the one with the least to do, or the next",
     "Replicas"},
    {"session-header", OPTION_HEADER, AT(session_header), 0, 0, NULL, {0}, "NAME",
     "requests with the same value of this header field go to the same replica while it is up", "Replicas"},

    {"host", OPTION_STRING, AT(host), 0, 0, "127.0.0.1", {0}, "ADDRESS",
     "address to listen on; 0.0.0.0 is everyone, and asks for --api-key", "Server"},
    {"port", OPTION_I32, AT(port), 0, 65535, "8000", {0}, "N", "port to listen on; 0 picks a free one", "Server"},
    {"api-key", OPTION_LIST, AT(api_keys), 0, 0, NULL, {0}, "KEY ...",
     "keys that requests must bring as a bearer token; also from VLLM_API_KEY", "Server"},
    {"api-key-file", OPTION_KEY_FILE, AT(api_keys), 0, 0, NULL, {0}, "FILE", "more keys, one a line", "Server"},
    {"metrics-auth", OPTION_BOOL, AT(metrics_auth), 0, 0, "false", {0}, NULL, "/metrics asks for a key too", "Server"},
    {"enable-log-requests", OPTION_BOOL, AT(enable_log_requests), 0, 0, "false", {0}, NULL,
     "one line at the end of each request", "Server"},
    {"log-level", OPTION_CHOICE, AT(log_level), 0, 0, "info", {"debug", "info", "warning", "error"}, NULL,
     "least level that is logged", "Server"},
    {"shutdown-timeout", OPTION_I32, AT(shutdown_timeout_s), 0, 86400, "30", {0}, "SECONDS",
     "after SIGTERM running requests may finish for so long; a second signal ends them at once", "Server"},
    {"request-timeout", OPTION_I32, AT(request_timeout_s), 0, 86400, "0", {0}, "SECONDS",
     "most a request may take from its arrival; 0: no limit", "Server"},
    {"keep-alive-timeout", OPTION_I32, AT(keep_alive_timeout_s), 1, 86400, "75", {0}, "SECONDS",
     "an idle connection is closed after so long", "Server"},
    {"max-connections", OPTION_I32, AT(max_connections), 1, 1 << 20, "8192", {0}, "N",
     "most open connections; above it 503 (lower where the system allows fewer open files)", "Server"},
    {"max-body-bytes", OPTION_BYTES, AT(max_body_bytes), KIB, KIB * MIB, "16M", {0}, "BYTES",
     "largest request body; above it 413", "Server"},
    {"max-header-bytes", OPTION_BYTES, AT(max_header_bytes), KIB, MIB, "16K", {0}, "BYTES",
     "longest request line and header fields; above it 431", "Server"},
    {"max-output-bytes", OPTION_BYTES, AT(max_output_bytes), 16 * KIB, KIB * MIB, "1M", {0}, "BYTES",
     "output kept for one slow reader before its request is held back", "Server"},
};
/* clang-format on */
const int32_t option_row_count = (int32_t)(sizeof option_rows / sizeof *option_rows);
