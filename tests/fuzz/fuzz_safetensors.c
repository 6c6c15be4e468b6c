/* safetensors: parse one file and read everything that the parser vouches for. Corpus: corpus/safetensors, made by
 * make_model_corpus. */
#include <stdlib.h>
#include <string.h>

#include "engine/model/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    struct safetensors *files = NULL;
    struct err err = {0};
    volatile unsigned sum = 0;
    size_t covered = 0;
    if (safetensors_open_memory(data, bytes, &files, &err)) {
        if (files || err.text[0] == '\0' || strchr(err.text, '\n')) abort();
        return 0;
    }
    for (int32_t i = 0; i < safetensors_tensor_count(files); i++) {
        const struct safetensors_tensor *tensor = safetensors_tensor(files, i);
        for (size_t j = 0; j < tensor->bytes; j++) sum += ((const unsigned char *)tensor->data)[j];
        covered += tensor->bytes;
        if (safetensors_find(files, tensor->name) != tensor) abort();
    }
    if (covered > bytes) abort(); /* no overlaps */
    safetensors_close(files);
    (void)sum;
    return 0;
}
