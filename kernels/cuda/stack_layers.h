/* stack_layers.h: a decode step of more rows than the one-kernel stack serves: a layer is three kernels, of which one
 * has all four products (stack_chain_sm90.cu). Behind stack.c, which owns the memory; rank thread. Knows nothing of who
 * asked. */
#ifndef QUIRE_KERNELS_CUDA_STACK_LAYERS_H
#define QUIRE_KERNELS_CUDA_STACK_LAYERS_H

#include "kernels/cuda/cuda.h"

struct stack_layers; /* opaque */

/* Rows of a step at most on this GPU; 0 where its kernel does not run. The options are of a model that the stack takes.
 */
int32_t stack_layers_rows(const struct backend *backend, const struct decode_stack_options *options);
size_t stack_layers_bytes(const struct decode_stack_options *options, int32_t rows);
/* memory: stack_layers_bytes, 256-byte aligned. Copies the options' layers. *out is NULL where no cluster of blocks has
 * room at once. */
int stack_layers_open(struct backend *backend, const struct decode_stack_options *options, int32_t rows, void *memory,
                      struct stack_layers **out, struct err *err);
void stack_layers_close(struct stack_layers *layers); /* NULL: nothing */
int stack_layers_run(struct backend *backend, const struct stack_layers *layers,
                     const struct op_decode_stack_args *args, struct err *err);

#endif
