/* Decode steps as recorded graphs, one for each number of padded rows. The first step of a number runs op by op and is
 * recorded behind that, while the device computes it: nothing waits for the recording, and ready does not either. The
 * engine has the usual numbers recorded while it has nothing else to do (model_record_next). */
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/model/model_private.h"

/* 1, 2, 4, then multiples of 8 up to 128, of 16 up to 256, of 32 up to 512 and so on: at most a sixteenth of the rows
 * is padding beyond 128, and there are 43 numbers up to 1024 rows, 59 up to 4096. */
int32_t decode_rows(int32_t rows, int32_t most) {
    int32_t power = 1, padded = rows;
    while (power < rows) power *= 2;
    if (rows <= 8)
        padded = power;
    else {
        int32_t step = power / 16 < 8 ? 8 : power / 16;
        padded = (rows + step - 1) / step * step;
    }
    return padded < most ? padded : most;
}

static struct decode_graph *graph_find(struct model *model, int32_t rows, bool stacked) {
    for (int32_t i = 0; i < model->graph_count; i++)
        if (model->graphs[i].rows == rows && model->graphs[i].stacked == stacked) return &model->graphs[i];
    return NULL;
}

bool graph_is_recorded(struct model *model, int32_t rows) {
    return graph_find(model, rows, model_stack_serves(model, rows)) != NULL;
}

static int graph_record(struct model *model, const struct inputs *in, struct err *err) {
    struct decode_graph *place = &model->graphs[model->graph_count];
    struct err end_err = {0};
    int64_t begin_ns = clock_now_ns();
    int rc = backend_graph_begin(model->backend, err);
    if (rc) return rc;
    rc = model_forward(model, in, err);
    int end = backend_graph_end(model->backend, &place->graph, rc ? &end_err : err);
    if (rc || end) return rc ? rc : end;
    model->stats.graph_captures++;
    model->stats.graph_capture_ns += (uint64_t)(clock_now_ns() - begin_ns);
    return 0;
}

int model_decode(struct model *model, const struct inputs *in, struct err *err) {
    bool stacked = model_stack_serves(model, in->rows);
    model->stats.decode_steps++;
    model->stats.stack_steps += stacked;
    if (!model->graphs_on) return model_forward(model, in, err);
    struct decode_graph *found = graph_find(model, in->rows, stacked);
    if (found && found->graph) {
        model->stats.graph_replays++;
        return backend_graph_launch(model->backend, found->graph, err);
    }
    int rc = model_forward(model, in, err);
    if (rc || found || model->graph_count == MODEL_GRAPHS_MAX) return rc;
    struct err why = {0};
    model->graphs[model->graph_count] = (struct decode_graph){.rows = in->rows, .stacked = stacked};
    rc = model->graphs_failed ? 0 : graph_record(model, in, &why);
    model->graph_count++;
    if (rc) graphs_give_up(model, &why);
    return 0; /* the step itself is under way */
}

/* The device's memory is most likely what a recording lacks; steps run without it. After a fault of the device every
 * further call fails, so that the fence behind this step tells of it. One of several ranks goes on to pad its steps and
 * to count what would be recorded, since all must make the same collectives. */
void graphs_give_up(struct model *model, const struct err *why) {
    log_warning("a decode step cannot be recorded: all go op by op from here on, which takes longer", "why=%s",
                log_quote(why->text).text);
    if (model->shard.ranks > 1) {
        model->graphs_failed = true;
        for (int32_t i = 0; i < model->graph_count; i++) {
            backend_graph_free(model->backend, model->graphs[i].graph);
            model->graphs[i].graph = NULL;
        }
        return;
    }
    model->graphs_on = false;
    graphs_free(model);
}

void graphs_free(struct model *model) {
    for (int32_t i = 0; i < model->graph_count; i++) backend_graph_free(model->backend, model->graphs[i].graph);
    model->graph_count = 0;
    model->rows_recorded = 0;
}
