/* devices.h: which devices the replicas and their ranks take, settled before anything is loaded and before there is
 * a second thread: how many there are, how many one copy of the model needs (--tensor-parallel-size auto), and that
 * nobody asks for more. Main thread, at start. */
#ifndef QUIRE_SERVER_DEVICES_H
#define QUIRE_SERVER_DEVICES_H

#include "server/options.h"

/* Settles device, tensor_parallel_size and data_parallel_size where they were left open. ERR_INVALID with the
 * arithmetic; one device alone is left to the engine, which says best what is wrong with it. */
int devices_settle(struct options *options, const char *model_path, struct err *err);

#endif
