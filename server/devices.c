#include "server/devices.h"

#include <string.h>

#include "engine/base/log.h"
#include "engine/fit.h"
#include "server/engine_setup.h"

static int named_check(const struct options *o, int32_t seen, struct err *err) {
    for (int32_t i = 0; i < o->device_count; i++)
        if (o->devices[i] >= seen)
            return err_set_field(err, ERR_INVALID, "--device",
                                 "--device names cuda:%d, and this process sees %d CUDA devices: cuda:0 to cuda:%d",
                                 o->devices[i], seen, seen - 1);
    return 0;
}

static int count_check(const struct options *o, int32_t there, struct err *err) {
    int32_t wanted = o->data_parallel_size * o->tensor_parallel_size;
    if (wanted <= there) return 0;
    return err_set_field(err, ERR_INVALID, "--data-parallel-size",
                         "--data-parallel-size %d x --tensor-parallel-size %d = %d devices, and %s %d",
                         o->data_parallel_size, o->tensor_parallel_size, wanted,
                         o->device_count ? "--device names" : "this process sees", there);
}

/* As few devices as hold a copy of the model; unless it was said how many copies, as many as the devices make. */
static int auto_settle(struct options *o, const char *model_path, int32_t there, struct err *err) {
    struct engine_setup setup = {o, model_path, 0};
    struct host_options host;
    struct fit fit;
    int32_t ranks;
    o->tensor_parallel_size = 1;
    engine_setup_fill(&setup, &host);
    host.engine.ranks = o->device_count;
    memcpy(host.engine.ordinals, o->devices, sizeof o->devices);
    if (fit_probe(&host.engine, &fit, err) || fit_choose(&fit, &ranks, err)) return err->code;
    o->tensor_parallel_size = ranks;
    if (o->data_parallel_size == 1) o->data_parallel_size = there / ranks;
    log_info("devices chosen", "tensor_parallel_size=%d data_parallel_size=%d of=%d", ranks, o->data_parallel_size,
             there);
    return 0;
}

int devices_settle(struct options *o, const char *model_path, struct err *err) {
    bool alone = o->data_parallel_size * o->tensor_parallel_size == 1 && o->device_count <= 1;
    if (alone) return 0;
    int32_t seen = o->device == DEVICE_CPU ? 0 : backend_cuda_devices();
    if (!seen) { /* auto: the CPU serves, as one device for any number; cuda: the engine says why there is none */
        if (o->device == DEVICE_AUTO) o->device = DEVICE_CPU;
        if (!o->tensor_parallel_size) o->tensor_parallel_size = 1;
        return 0;
    }
    o->device = DEVICE_CUDA;
    int32_t there = o->device_count ? o->device_count : seen;
    if (named_check(o, seen, err)) return err->code;
    if (!o->tensor_parallel_size && auto_settle(o, model_path, there, err)) return err->code;
    return count_check(o, there, err);
}
