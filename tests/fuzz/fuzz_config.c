/* config.json: read, judge, and build the rope table that follows from it. Corpus: corpus/config, made by
 * make_model_corpus. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model/model_files.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static float table[8 * 1024];
    struct model_spec spec = {0};
    struct err err = {0};
    int rc = hf_config_read((const char *)data, bytes, &spec, &err);
    if (rc == 0) rc = model_spec_check(&spec, &err);
    if (rc) {
        if (err.text[0] == '\0' || strchr(err.text, '\n')) abort();
        return 0;
    }
    rope_table_fill(&spec, NULL, 8, table);
    for (int32_t i = 0; i < 8 * spec.rotary_dim; i++)
        if (!isfinite(table[i])) abort();
    for (int role = 0; role < ROLE_COUNT; role++) {
        int64_t rows = 0, cols = 0;
        role_shape(&spec, (enum tensor_role)role, &rows, &cols);
        if (rows < 1 || cols < 1) abort();
    }
    return 0;
}
